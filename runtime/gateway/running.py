"""One running program of a client: its interpreter, and the events that wait to be sent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from ..program.events import Done, Event, Synced, TextDelta, Value
from ..program.instructions import Instruction
from ..program.interpreter import Interpreter
from ..protocol.errors import ErrorInfo

log = logging.getLogger(__name__)

Make = Callable[[Callable[[list[Event]], None]], Interpreter]

_encoder = msgspec.msgpack.Encoder()


class RunningProgram:
    """Collects events and hands them on once a turn of the loop, or when the client reads again.

    ``ready`` is called when there is something to take. ``size`` is about how many bytes wait.
    """

    def __init__(self, pid: int, make: Make, ready: Callable[[RunningProgram], None]) -> None:
        self.pid = pid
        self.done = False
        self._events: list[Event] = []
        self.size = 0
        self._ready = ready
        self._announced = False
        self._loop = asyncio.get_running_loop()
        self._interpreter = make(self._emit)
        self._task = self._loop.create_task(self._interpreter.run())
        self._task.add_done_callback(self._ended)

    def feed(self, instructions: Sequence[Instruction], closed: bool) -> None:
        """Raises `ProgramError`, after which the program ends by itself."""
        self._interpreter.feed(instructions, closed)

    def cancel(self, why: str | None = None) -> None:
        self._interpreter.cancel(why)

    async def wait(self) -> None:
        """Until the interpreter has ended, however."""
        await asyncio.wait([self._task])

    def take(self) -> msgspec.Raw | None:
        """The events since the last call, encoded; ``None`` when there are none."""
        self._announced = False
        if not self._events:
            return None
        events, self._events, self.size = self._events, [], 0
        return msgspec.Raw(_encoder.encode(events))

    def _emit(self, events: list[Event]) -> None:
        for event in events:
            self._add(event)
        if not self._announced:
            self._announced = True
            self._loop.call_soon(self._ready, self)

    def _add(self, event: Event) -> None:
        if isinstance(event, TextDelta):
            self.size += len(event.text)
            last = self._events[-1] if self._events else None
            if isinstance(last, TextDelta) and _joins(last, event):
                self._events[-1] = TextDelta(event.stream, last.text + event.text, event.op)
                return
        elif isinstance(event, Value):
            self.size += len(event.value) if isinstance(event.value, str) else 1000
        elif isinstance(event, Synced):
            self.size += len(event.text or "")
        elif isinstance(event, Done):
            self.done = True
        self.size += 50
        self._events.append(event)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("the interpreter of a program broke", exc_info=error)
        if not self.done:
            self._emit([Done(ErrorInfo.of(error or asyncio.CancelledError()))])


def _joins(last: TextDelta, new: TextDelta) -> bool:
    return (
        last.stream == new.stream and last.op == new.op and last.meta is None and new.meta is None
    )
