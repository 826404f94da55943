"""What has come back of one running program, and the waiting for more."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Container, Sequence
from typing import Any, TypeVar

from ramet.runtime.program.events import (
    Entered,
    Event,
    Failed,
    Synced,
    TextDelta,
    Value,
    Warned,
)
from ramet.runtime.protocol import BackendError, ErrorInfo

T = TypeVar("T")
Lineage = Sequence[tuple[int, int]]


class EventStore:
    """Filled from the IO thread, read from any thread and from any asyncio loop.

    ``values`` is keyed by (op, name), ``synced`` by op. ``deltas`` holds every text delta in the
    order it came. ``fatal`` is what ended all of the program; what came before stays readable.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.values: dict[tuple[int, str | None], Value] = {}
        self.by_name: dict[tuple[int, str], list[Value]] = {}
        self.synced: dict[int, Synced] = {}
        self.deltas: list[TextDelta] = []
        self.by_stream: dict[int, list[TextDelta]] = {}
        self.failed: dict[int, Failed] = {}
        self.failures: list[Failed] = []
        self.warnings: list[Warned] = []
        self.done = False
        self.fatal: ErrorInfo | None = None
        self._at_end: list[Callable[[], None]] = []
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    # --- filling ----------------------------------------------------------------------------------

    def feed(self, events: Sequence[Event]) -> None:
        """Take in events, in order."""
        with self.changed:
            for event in events:
                self._take(event)
            self._notify()
        self._ended()

    def fail(self, error: ErrorInfo) -> None:
        """End the program: every reader of what has not come raises ``error``."""
        with self.changed:
            if not self.done:
                self.fatal = self.fatal or error
                self.done = True
            self._notify()
        self._ended()

    def when_done(self, call: Callable[[], None]) -> None:
        """Call once nothing more will come: now, or in the thread that learns of it."""
        with self.changed:
            self._at_end.append(call)
        self._ended()

    def _ended(self) -> None:
        with self.changed:
            calls, self._at_end = (self._at_end, []) if self.done else ([], self._at_end)
        for call in calls:
            call()

    def touch(self) -> None:
        """Wake the waiting: something that they look at beside the events has changed."""
        with self.changed:
            self._notify()

    def _take(self, event: Event) -> None:
        if isinstance(event, TextDelta):
            self.deltas.append(event)
            self.by_stream.setdefault(event.stream, []).append(event)
        elif isinstance(event, Value):
            self.values[event.op, event.name] = event
            if event.name is not None:
                self.by_name.setdefault((event.stream, event.name), []).append(event)
        elif isinstance(event, Synced):
            self.synced[event.op] = event
        elif isinstance(event, Failed):
            self.failed.setdefault(event.stream, event)
            self.failures.append(event)
        elif isinstance(event, Warned):
            self.warnings.append(event)
        elif isinstance(event, Entered):
            return  # nobody here asks for it
        else:
            self.fatal = self.fatal or event.error
            self.done = True

    def _notify(self) -> None:
        self.changed.notify_all()
        waiting, self._waiting = self._waiting, []
        for loop, future in waiting:
            try:
                loop.call_soon_threadsafe(_wake, future)
            except RuntimeError:  # that loop is closed: nobody waits there any more
                continue

    # --- reading ----------------------------------------------------------------------------------

    def wait(self, check: Callable[[], T | None], timeout: float | None = None) -> T:
        """What ``check`` returns once it is not None; it is called again after every change.

        Raises `BackendError` after ``timeout`` seconds, and whatever ``check`` raises.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self.changed:
            while (result := check()) is None:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise BackendError(f"nothing came within {timeout} s")
                self.changed.wait(left)
            return result

    async def wait_async(self, check: Callable[[], T | None]) -> T:
        """As `wait`, for asyncio."""
        loop = asyncio.get_running_loop()
        while True:
            with self.changed:
                if (result := check()) is not None:
                    return result
                future: asyncio.Future[None] = loop.create_future()
                self._waiting.append((loop, future))
            await future

    def error_before(self, lineage: Lineage) -> ErrorInfo | None:
        """Why an instruction can no longer run, if so: ``lineage`` lists (stream, op) that must all
        be reached for it."""
        for stream, op in lineage:
            failed = self.failed.get(stream)
            if failed is not None and failed.op <= op:
                return failed.error
        if self.fatal is not None:
            return self.fatal
        if self.done:
            return self.failures[0].error if self.failures else _LOST
        return None

    def value(self, op: int, name: str | None, lineage: Lineage) -> Value | None:
        """The value if it is there, None while it may come; raises why it never will."""
        value = self.values.get((op, name))
        if value is None:
            self.check(lineage)
        return value

    def history(self, stream: int, name: str, but: Container[int]) -> list[Any]:
        """The values that a name of a stream has had so far, without those of instructions ``but``,
        which only report one again."""
        with self.changed:
            found = self.by_name.get((stream, name), ())
            return [value.value for value in found if value.op not in but]

    def reply(self, op: int, lineage: Lineage) -> Synced | None:
        """The answer to a `Sync`; as `value`."""
        synced = self.synced.get(op)
        if synced is None:
            self.check(lineage)
        return synced

    def check(self, lineage: Lineage) -> None:
        """Raise why what ``lineage`` leads to will never come, if so."""
        error = self.error_before(lineage)
        if error is not None:
            raise error.exception()


_LOST = ErrorInfo("backend", "the program ended without this value")


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
