"""A text that several streams begin with, and its KV, which should stay until all have read it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ..memory.radix_tree import common_prefix
from .request import Handle, IntArray


class ForkPoint:
    """Counts the streams that begin with it and may yet have it read. The first that does marks it
    in the engine, if there are others; the last to let go takes the mark back."""

    def __init__(
        self, ids: IntArray, pending: Sequence[Any], cut: Callable[[], Awaitable[IntArray]]
    ):
        """``cut`` gives the text's tokens: ``ids``, then those of ``pending``."""
        self._ids = ids
        self._pending = [*pending]
        self._cut = cut
        self._count = 0
        self._handle: Handle | None = None

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
        if self._count == 0 and self._handle is not None:
            self._handle.release()
            self._handle = None

    async def mark(
        self, prompt: IntArray, new_handle: Callable[[], Handle]
    ) -> tuple[int, int] | None:
        """A handle and how many leading tokens of ``prompt`` it is for, or ``None`` where there is
        nothing (more) to mark. The caller holds this."""
        if self._handle is not None or self._count < 2:
            return None
        handle = self._handle = new_handle()
        length = common_prefix(await self._cut(), prompt)  # its end may be cut otherwise there
        if handle is not self._handle or not length:
            return None
        return handle.number, length
