"""Who computes a prefix that several waiting requests share: one of them, once."""

from __future__ import annotations

from ..memory.kv_memory import KVMemory, common_prefix
from .request import Request
from .rows import Rows
from .waiting import cached

WORTH_WAITING = 16
"""Tokens. A shorter shared prefix is computed again rather than waited for."""


class Siblings:
    """Requests that share an uncached prefix with one that is being prefilled (its owner) wait for
    it.

    Nothing is recorded but the lengths of common prefixes: whether somebody waits is asked anew at
    every step, so when an owner is aborted or retracted, the next in line simply becomes the owner.
    """

    def __init__(self, rows: Rows, memory: KVMemory) -> None:
        self._rows = rows
        self._memory = memory
        self._owners: list[Request] = []

    def add(self, request: Request) -> None:
        """This request now has a row and uncomputed prompt."""
        self._owners.append(request)

    def refresh(self) -> None:
        """Forget owners that have computed all, or are gone."""
        rows = self._rows
        self._owners = [
            owner
            for owner in self._owners
            if owner.row >= 0 and rows.computed[owner.row] < rows.target[owner.row]
        ]

    def must_wait(self, request: Request) -> bool:
        """Whether an owner will still compute a good part of this request's prompt."""
        rows = self._rows
        for owner in self._owners:
            if owner.namespace != request.namespace:
                continue
            if rows.target[owner.row] - rows.computed[owner.row] < WORTH_WAITING:
                continue  # too little of its prompt is left to wait for
            common = request.overlaps.get(owner.serial)
            if common is None:
                common = common_prefix(request.tokens[: request.line], owner.tokens[: owner.line])
                request.overlaps[owner.serial] = common
            useful = min(common, request.reusable, int(rows.target[owner.row]))
            if useful - int(rows.computed[owner.row]) < WORTH_WAITING:
                continue
            if useful - cached(request, self._memory) >= WORTH_WAITING:
                return True
        return False
