"""A text that several streams begin with, and its KV, which should stay until all have read it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ..memory.radix_node import common_prefix
from .request import Handle, IntArray

Mark = tuple[int, int]
MOST_MARKS = 4


class ForkPoint:
    """Counts the streams that begin with it and may yet have it read. The first that does marks it
    in the engine, once for each of the others (but not more often than an eviction policy counts);
    each that lets go takes a mark back."""

    def __init__(
        self, ids: IntArray, pending: Sequence[Any], cut: Callable[[], Awaitable[IntArray]]
    ):
        """``cut`` gives the text's tokens: ``ids``, then those of ``pending``."""
        self._ids = ids
        self._pending = [*pending]
        self._cut = cut
        self._count = 0
        self._marked = False
        self._handles: list[Handle] = []

    def is_at(self, ids: IntArray, pending: Sequence[Any]) -> bool:
        """Whether a stream stands where this one was made."""
        return (
            ids is self._ids
            and len(pending) == len(self._pending)
            and all(a is b for a, b in zip(pending, self._pending))
        )

    def acquire(self) -> ForkPoint:
        self._count += 1
        return self

    def release(self) -> None:
        assert self._count > 0
        self._count -= 1
        if len(self._handles) > self._count:
            self._handles.pop().release()

    async def mark(self, prompt: IntArray, new_handle: Callable[[], Handle]) -> list[Mark]:
        """Handles, each with how many leading tokens of ``prompt`` it is for; none where there is
        nothing (more) to mark. The caller holds this."""
        if self._marked or self._count < 2:
            return []
        self._marked = True
        length = common_prefix(await self._cut(), prompt)  # its end may be cut otherwise there
        if not length:
            return []
        self._handles = [new_handle() for _ in range(min(self._count - 1, MOST_MARKS))]
        return [(handle.number, length) for handle in self._handles]
