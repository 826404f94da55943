"""Short calls without the IO thread: the caller itself speaks to a gateway of this machine.

Between a caller and the IO thread, and between that and a ZMQ socket's own, each way wakes two
threads. A call of a few prompts waits for nothing but its answers, so it takes a lane for itself.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import ClassVar

from ramet.runtime.protocol import BackendError, ErrorInfo
from ramet.runtime.protocol.awake import spin_seconds
from ramet.runtime.protocol.codec import client_codec, gateway_codec
from ramet.runtime.protocol.lane import Lane, connect
from ramet.runtime.protocol.messages import (
    PROTOCOL_VERSION,
    AbortGenerate,
    ClientMessage,
    Generate,
    Generated,
    GenerateFailed,
    Hello,
    Refused,
    Welcome,
)

LOOK_MS = 100
"""How often a caller that waits looks whether the connection is still good."""
HELLO_SECONDS = 2.0
MAX_ANSWER_BYTES = 256 << 20

Lost = Callable[[], ErrorInfo | None]
"""Why a server cannot be reached any more, if it cannot."""


class Direct:
    """A lane of one caller at a time. Only `abort` may be called by others."""

    _waiting: ClassVar[set[int]] = set()
    """Lanes of this process where a caller waits now: several would only take turns in spinning."""

    def __init__(self, lane: Lane) -> None:
        self._spin = 0.0
        self._lane = lane
        self._sending = threading.Lock()
        self._poll = select.poll()
        self._poll.register(lane.fileno(), select.POLLIN)

    @classmethod
    def open(cls, address: str, api_key: str | None, priority: int | str | None) -> Direct | None:
        """A lane to the gateway at an address that welcomes us; ``None`` where there is none."""
        lane = connect(address, MAX_ANSWER_BYTES)
        if lane is None:
            return None
        made = cls(lane)
        hello = Hello(version=PROTOCOL_VERSION, client="ramet", api_key=api_key, priority=priority)
        try:
            made._send([hello])
            until = time.monotonic() + HELLO_SECONDS
            while time.monotonic() < until:
                for answer in map(gateway_codec.decode, made._receive(LOOK_MS)):
                    if isinstance(answer, Welcome):
                        made._spin = answer.spin_seconds
                        return made
                    if isinstance(answer, Refused):
                        until = 0.0
        except (ConnectionError, BackendError):
            pass
        except BaseException:
            made.close()
            raise
        made.close()
        return None

    def run(
        self,
        messages: list[Generate],
        tell: Callable[[int, Generated | ErrorInfo], object],
        lost: Lost,
    ) -> None:
        """Send requests, and ``tell`` each one's answer until all have one. Raises what ``tell``
        raises, and `BackendError` when the server is gone; then the lane is of no more use."""
        open_ = {message.rid: index for index, message in enumerate(messages)}
        self._waiting.add(id(self))
        try:
            self._send(messages)
            spin = min(self._spin, spin_seconds()) if len(self._waiting) == 1 else 0.0
            awake = time.monotonic() + spin
            while open_:
                for data in self._receive(0 if time.monotonic() < awake else LOOK_MS):
                    answer = gateway_codec.decode(data)
                    if isinstance(answer, Refused):
                        raise answer.error.exception()
                    if not isinstance(answer, (Generated, GenerateFailed)):
                        continue  # the gateway's probe
                    index = open_.pop(answer.rid, None)
                    failed = isinstance(answer, GenerateFailed)
                    if failed and (why := lost()) is not None:
                        raise why.exception()
                    if index is not None:
                        tell(index, answer.error if isinstance(answer, GenerateFailed) else answer)
                if open_ and (why := lost()) is not None:
                    raise why.exception()
        except ConnectionError as error:
            raise _reason(lost) or BackendError(f"the ramet server is gone: {error}") from None
        finally:
            self._waiting.discard(id(self))

    def abort(self, rid: str) -> None:
        """Abort a request that runs here, from any thread."""
        try:
            self._send([AbortGenerate(rid=rid)])
        except ConnectionError:
            return  # whoever waits here hears of it

    def close(self) -> None:
        """What still runs is aborted."""
        self._lane.close()

    def _send(self, messages: Sequence[ClientMessage]) -> None:
        data = [client_codec.encode(message) for message in messages]
        with self._sending:
            self._lane.send(data)

    def _receive(self, wait_ms: int) -> list[bytes]:
        """What has come, within so long."""
        if self._lane.blocked:
            with self._sending:
                done = self._lane.flush()
            self._poll.modify(self._lane.fileno(), select.POLLIN | (0 if done else select.POLLOUT))
        if wait_ms:
            self._poll.poll(wait_ms)
        return self._lane.receive()


def _reason(lost: Lost) -> Exception | None:
    """Why the server is gone, as whoever watches it learns it in a moment."""
    until = time.monotonic() + 1.0
    while (why := lost()) is None:
        if time.monotonic() > until:
            return None
        time.sleep(0.005)
    return why.exception()


def elsewhere(_: Generated | ErrorInfo) -> None:
    """Who is told, on the connection, of a request that runs on a lane."""


class DirectLines:
    """The lanes of one connection: as many as calls run at a time, kept for the next ones."""

    MOST_KEPT = 16

    def __init__(self, address: str, api_key: str | None, priority: int | str | None) -> None:
        self._open = lambda: Direct.open(address, api_key, priority)
        self._free: list[Direct] = []
        self._none = self._some = self._closed = False
        self._pid = os.getpid()
        self.running: dict[str, Direct] = {}
        """Where each request runs, by its id."""

    def take(self) -> Direct | None:
        """A lane for a call, or ``None``: the gateway has none, it is elsewhere perhaps."""
        if self._none or self._pid != os.getpid():
            return None
        try:
            return self._free.pop()
        except IndexError:
            found = self._open()
            self._some = self._some or found is not None
            self._none = not self._some
            return found

    def give(self, line: Direct) -> None:
        """Its call has ended well."""
        if len(self._free) < self.MOST_KEPT:
            self._free.append(line)
        else:
            line.close()
        if self._closed:  # looked at last: whoever closes may have come in between
            self.close()

    def close(self) -> None:
        """Also of those that still run, as soon as they are given back."""
        self._closed = True
        with suppress(IndexError):  # others may take and give meanwhile
            while True:
                self._free.pop().close()
