"""One HTTP request's generations: all its prompts at the same time, whole or piece by piece."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ...protocol.messages import Generate, Generated
from ..generate import generate
from ..request import IntArray
from ..stopper import Stopper
from .errors import bad
from .state import HttpState, Live, Running
from .work import Work

Pieces = list[tuple[int, Generated]]


class Part:
    """Prompts of a run under an id of their own. Aborted, they end with what they have."""

    def __init__(self, rid: str) -> None:
        self.rid = rid
        self.stopper = Stopper()

    def abort(self) -> None:
        self.stopper.stop("the request was aborted")


class Run:
    """``samplings`` has one set of sampling parameters a prompt. Use it once: `whole` or `pieces`.
    Cancelled or closed, it aborts what runs in the engine, and so it does when it is aborted.
    ``rids``, one a prompt, are ids by which prompts are aborted apart instead of all together."""

    def __init__(
        self,
        state: HttpState,
        live: Live,
        rid: str,
        prompts: Sequence[IntArray],
        samplings: Sequence[dict[str, Any]],
        cache_salt: str | None = None,
        rids: Sequence[str] | None = None,
        explain: bool | None = None,
    ) -> None:
        samples = sum(int(sampling.get("n") or 1) for sampling in samplings)
        if samples > state.limits.samples:
            raise bad(f"prompts times n is {samples}, above {state.limits.samples}", "n")
        self.rid = rid
        self._state = state
        self._live = live
        self._prompts = prompts
        self._samplings = samplings
        self._salt = cache_salt
        self._explain = bool(explain)
        self._parts = {name: Part(name) for name in rids or ()}
        self._stoppers = [self._parts[name].stopper for name in rids or ()]
        self._work: Work[Generated] = Work(rid)
        self._queue: deque[tuple[int, Generated]] = deque()
        self._news = asyncio.Event()

    def abort(self) -> None:
        """Whoever waits for it gets an `AbortedError`."""
        self._work.abort()

    async def whole(self) -> list[Generated]:
        """One result a prompt. Raises `HttpError` and what the generations raise."""
        self._begin(stream=False)
        try:
            return await self._work.results()
        finally:
            await self._end()

    async def pieces(self) -> AsyncGenerator[Pieces, None]:
        """What has come since the last time, with the prompts' numbers; a prompt's last piece is
        ``done``. Raises as `whole` does."""
        task = self._begin(stream=True)
        try:
            while not task.done() or self._queue:
                await self._news.wait()
                self._news.clear()
                if self._queue:
                    batch = list(self._queue)
                    self._queue.clear()
                    yield batch
            await self._work.results()
        finally:
            await self._end()

    def _begin(self, stream: bool) -> asyncio.Task[list[Generated]]:
        self._enter()
        jobs = [self._one(number, stream) for number in range(len(self._prompts))]
        task = self._work.begin(jobs)
        task.add_done_callback(lambda _: self._news.set())
        return task

    def _enter(self) -> None:
        entered: list[Running] = []
        try:
            for one in [*self._parts.values()] or [self]:
                self._state.enter(one)
                entered.append(one)
        except BaseException:
            for one in entered:
                self._state.leave(one)
            raise

    async def _one(self, number: int, stream: bool) -> Generated:
        message = Generate(
            rid=self.rid,
            input_ids=self._prompts[number].tobytes(),
            sampling=self._samplings[number],
            stream=stream,
            cache_salt=self._salt,
            explain=self._explain,
        )
        program = next(self._state.numbers)
        executor = self._live.executor
        stopper = self._stoppers[number] if self._stoppers else None
        result = await generate(
            executor, message, program, lambda piece: self._put(number, piece), stopper
        )
        if stream:
            self._put(number, result)
        return result

    def _put(self, number: int, piece: Generated) -> None:
        self._queue.append((number, piece))
        self._news.set()

    async def _end(self) -> None:
        await self._work.end()
        for one in [*self._parts.values()] or [self]:
            self._state.leave(one)
