"""One program of an HTTP client: its events wait here for a reader, and a lease ends it when
nobody comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from ...program.events import Done, Event
from ...program.instructions import Instruction, Program
from ..running import RunningProgram
from .errors import bad, cut
from .program_forms import LEASE_S, ProgramForm
from .state import HttpState, Live

BUFFERED_BYTES = 32 << 20
"""More than this unread, and the program is cancelled."""
TICK_S = 1.0


class HeldProgram:
    """Runs from the moment it is made. The lease counts from the last request that named the
    program; it ends what is still open, and what is closed and has no reader.

    Raises `HttpError` when too much runs.
    """

    def __init__(self, state: HttpState, live: Live, rid: str, form: ProgramForm) -> None:
        self.rid = rid
        self.model = live.model
        self.closed = False
        self.lease = form.lease or LEASE_S
        self.reading = False
        self._state = state
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._renewed = self._loop.time()
        state.enter(self)
        deltas = bool(form.stream) if form.deltas is None else form.deltas
        self._running: RunningProgram = live.service.start(
            form.program or Program(),
            self._ready,
            args=form.args or {},
            sampling=form.sampling or {},
            stream=deltas,
            cache_salt=form.cache_salt,
        )
        self._timer = self._loop.call_later(min(TICK_S, self.lease / 4), self._tick)

    @property
    def status(self) -> str:
        if self._running.done:
            return "done"
        return "running" if self.closed else "open"

    def feed(self, instructions: Sequence[Instruction], closed: bool) -> None:
        """Raises `ProgramError`, after which the program ends by itself, and `HttpError`."""
        self.renew()
        if self.closed and instructions:
            raise bad(f"program {cut(self.rid)!r} is closed", "instructions")
        self.closed = self.closed or closed
        self._running.feed(instructions, closed)

    def renew(self) -> None:
        self._renewed = self._loop.time()

    def abort(self, why: str = "the program was aborted") -> None:
        """Whoever reads gets a `Done` that says so."""
        self._running.cancel(why)

    def claim(self) -> None:
        """Be its one reader, until `release`. Raises `HttpError` when somebody is already."""
        if self.reading:
            raise bad(f"the events of program {self.rid!r} are being read already", "id")
        self.reading = True

    def release(self) -> None:
        self.reading = False
        self.renew()

    async def batches(self) -> AsyncGenerator[list[Event], None]:
        """Events as they come, the last of all a `Done`. For whoever has claimed it."""
        while True:
            events = self._running.take_events()
            if events:
                yield events
                if isinstance(events[-1], Done):
                    self._forget()
                    return
                continue
            await self._news.wait()
            self._news.clear()

    async def all(self) -> list[Event]:
        """All events, once the program has ended."""
        return [event async for batch in self.batches() for event in batch]

    async def end(self) -> None:
        """It is over, or shall be: nothing runs after this."""
        self._running.cancel("the client went away")
        await self._running.wait()
        self._forget()

    def _ready(self, _: RunningProgram) -> None:
        self._news.set()

    def _forget(self) -> None:
        self._timer.cancel()
        self._state.leave(self)

    def _tick(self) -> None:
        expired = self._loop.time() - self._renewed > self.lease
        if expired and not (self.closed and self.reading):
            self.abort(f"the program's lease of {self.lease:g} s has run out")
            if not self.reading:
                self._forget()
            return
        if self._running.size > BUFFERED_BYTES:
            self.abort(f"more than {BUFFERED_BYTES} bytes of events wait to be read")
        self._timer = self._loop.call_later(min(TICK_S, self.lease / 4), self._tick)
