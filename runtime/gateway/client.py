"""One connected client: what it may do, what runs for it, and what waits until it reads."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from ..program.instructions import Program
from ..protocol.codec import gateway_codec
from ..protocol.messages import GatewayMessage, ProgramEvents
from .origin import Origin
from .running import RunningProgram


class Client:
    """Sends never block: what the socket does not take waits here, programs' events unencoded."""

    def __init__(self, identity: bytes | int, send: Callable[[bytes], bool]) -> None:
        """``identity``: a ZMQ peer's, which that may have chosen, or the number of a lane. ``send``
        says whether the client takes more now; it raises `zmq.ZMQError` or
        `ConnectionError` when it is not there any more."""
        self.identity = identity
        self.welcomed = False
        self.origin = Origin()
        """Of all that it asks for."""
        self.may_flush = False
        self.name = ""
        self.programs: dict[int, RunningProgram] = {}
        self.registered: dict[int, Program] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._send = send
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = 0

    @property
    def blocked(self) -> bool:
        return bool(self._backlog)

    @property
    def waiting_bytes(self) -> int:
        """About how much waits for the client to read."""
        return self._backlog_bytes + sum(program.size for program in self.programs.values())

    @property
    def busy(self) -> bool:
        return bool(self.programs or self.tasks)

    def send(self, message: GatewayMessage) -> None:
        """Raises `zmq.ZMQError` or `ConnectionError` when it is not there any more."""
        data = gateway_codec.encode(message)
        if self._backlog or not self._send(data):
            self._backlog.append(data)
            self._backlog_bytes += len(data)

    def send_events(self, program: RunningProgram) -> None:
        """Send what a program has to say, unless the client has to read first."""
        if self._backlog:
            return
        events = program.take()
        if events is not None:
            self.send(ProgramEvents(pid=program.pid, events=events))
        if program.done:
            self.programs.pop(program.pid, None)

    def retry(self) -> None:
        """Try again to send what waits."""
        while self._backlog:
            if not self._send(self._backlog[0]):
                return
            self._backlog_bytes -= len(self._backlog.popleft())
        for program in list(self.programs.values()):
            self.send_events(program)

    def drop(self, why: str) -> list[asyncio.Future[Any]]:
        """Cancel all that runs for it; returns what to wait for."""
        for program in self.programs.values():
            program.cancel(why)
        for task in self.tasks.values():
            task.cancel()
        waits = [asyncio.ensure_future(p.wait()) for p in self.programs.values()]
        return [*waits, *self.tasks.values()]
