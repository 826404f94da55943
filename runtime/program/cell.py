"""A value that an instruction will produce, awaited by those that refer to it."""

from __future__ import annotations

import asyncio
from typing import Any

from ..protocol.errors import ErrorInfo
from ..protocol.meta import MetaInfo


class Cell:
    """Set or failed exactly once; later calls are ignored, so that a failure cannot be undone.

    ``gathered`` marks a list that a `Join` made, which a later `Join` of the same name replaces.
    The value ``None`` says that a block might have bound the name and has not. ``meta`` is what
    was reported with the value.
    """

    __slots__ = ("_waiters", "error", "gathered", "meta", "name", "ready", "value")

    def __init__(self, name: str = "", gathered: bool = False) -> None:
        self.name = name
        self.gathered = gathered
        self.ready = False
        self.value: str | list[Any] | None = None
        self.meta: MetaInfo | list[MetaInfo] | None = None
        self.error: ErrorInfo | None = None
        self._waiters: list[asyncio.Future[None]] = []

    def set(
        self, value: str | list[Any] | None, meta: MetaInfo | list[MetaInfo] | None = None
    ) -> None:
        if not self.ready:
            self.value, self.meta = value, meta
            self._wake()

    def fail(self, error: ErrorInfo) -> None:
        if not self.ready:
            self.error = error
            self._wake()

    async def get(self) -> str | list[Any] | None:
        """The value, once it is there. Raises the error with which its instruction failed."""
        if not self.ready:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        if self.error is not None:
            raise self.error.exception()
        return self.value

    def _wake(self) -> None:
        self.ready = True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()
