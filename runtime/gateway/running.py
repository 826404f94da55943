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

INTERVAL_S = 0.004

_encoder = msgspec.msgpack.Encoder()


class RunningProgram:
    """Collects events and hands them on once a turn of the loop, or when the client reads again;
    deltas alone at most every `INTERVAL_S`, so that fast streams are few messages.

    ``ready`` is called when there is something to take. ``size`` is about how many bytes wait.
    """

    def __init__(self, pid: int, make: Make, ready: Callable[[RunningProgram], None]) -> None:
        self.pid = pid
        self.done = False
        self._events: list[Event] = []
        self.size = 0
        self._ready = ready
        self._last = 0.0
        self._soon: asyncio.Handle | None = None
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

    def take_events(self) -> list[Event]:
        """The events since the last call."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if not self._events:
            return []
        self._last = self._loop.time()
        events, self._events, self.size = self._events, [], 0
        return events

    def take(self) -> msgspec.Raw | None:
        """The same, encoded; ``None`` when there are none."""
        events = self.take_events()
        return msgspec.Raw(_encoder.encode(events)) if events else None

    def _emit(self, events: list[Event]) -> None:
        patient = True
        for event in events:
            patient = self._add(event) and patient
        if patient and self._soon is None:
            due = max(self._loop.time(), self._last + INTERVAL_S)
            self._soon = self._loop.call_at(due, self._ready, self)
        elif not patient and (self._soon is None or isinstance(self._soon, asyncio.TimerHandle)):
            if self._soon is not None:
                self._soon.cancel()
            self._soon = self._loop.call_soon(self._ready, self)

    def _add(self, event: Event) -> bool:
        """Returns whether it can wait a little."""
        if isinstance(event, TextDelta):
            self.size += len(event.text)
            last = self._events[-1] if self._events else None
            if isinstance(last, TextDelta) and _joins(last, event):
                self._events[-1] = TextDelta(event.stream, last.text + event.text, event.op)
                return True
        elif isinstance(event, Value):
            self.size += len(event.value) if isinstance(event.value, str) else 1000
        elif isinstance(event, Synced):
            self.size += len(event.text or "")
        elif isinstance(event, Done):
            self.done = True
        self.size += 50
        self._events.append(event)
        return isinstance(event, TextDelta)

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
