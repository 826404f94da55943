"""What one HTTP request has set going in the engine, until it is done or aborted by its id."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Generic, TypeVar

from ...protocol.errors import AbortedError
from ..generation import all_of

T = TypeVar("T")


class Work(Generic[T]):
    """Jobs that run at the same time. Aborted, it raises `AbortedError` for whoever waits."""

    def __init__(self, rid: str) -> None:
        self.rid = rid
        self._task: asyncio.Task[list[T]] | None = None
        self._aborted = False

    def abort(self) -> None:
        self._aborted = True
        if self._task is not None:
            self._task.cancel()

    def begin(self, jobs: Sequence[Coroutine[Any, Any, T]]) -> asyncio.Task[list[T]]:
        """The task that does them all; when one fails, the others are cancelled."""
        self._task = asyncio.ensure_future(all_of(jobs))
        return self._task

    async def results(self) -> list[T]:
        """One a job, in their order. Raises what a job raised; cancelled, it cancels them."""
        assert self._task is not None
        try:
            return await self._task
        except asyncio.CancelledError:
            if self._aborted:
                raise AbortedError("the request was aborted") from None
            raise

    async def end(self) -> None:
        """Cancel what is not done, and wait until it is gone."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
