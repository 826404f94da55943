"""A lane driven by the running asyncio loop, as `Wire` is for a ZMQ socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .lane import Lane
from .wire import MOST_FRAMES

OnMessages = Callable[[list[bytes]], None]


class LaneWire:
    """Calls ``on_messages`` with what came together, `MOST_FRAMES` at most; ``on_gone`` once, when
    the peer is. Sends never block."""

    def __init__(self, lane: Lane, on_messages: OnMessages, on_gone: Callable[[], None]) -> None:
        self._lane = lane
        self._on_messages = on_messages
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._descriptor = lane.fileno()
        self._posted: list[bytes] = []
        self._writing = False
        self._closed = False
        self._loop.add_reader(self._descriptor, self._read)

    @property
    def blocked(self) -> bool:
        """Whether something waits for the peer to read."""
        return not self._closed and self._lane.blocked

    def send(self, message: bytes) -> bool:
        """False: the peer does not take more now. Raises `ConnectionError` when it is gone."""
        if self._closed:
            raise ConnectionError("the lane is closed")
        if self._lane.blocked:
            return False
        self._lane.send((message,))
        self._watch()
        return True

    def post(self, message: bytes) -> None:
        """Send a message at the end of this turn of the loop, together with the others posted in
        it, however much waits already."""
        self._posted.append(message)
        if len(self._posted) == 1:
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send what was posted now, as no more is to come in this turn."""
        posted, self._posted = self._posted, []
        if self._closed or not posted:
            return
        try:
            self._lane.send(posted)
        except ConnectionError:
            return  # the reader hears of it, after what the peer said before
        self._watch()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._descriptor)
            if self._writing:
                self._loop.remove_writer(self._descriptor)
            self._lane.close()

    def _watch(self) -> None:
        if self._lane.blocked and not self._writing:
            self._writing = True
            self._loop.add_writer(self._descriptor, self._write)

    def _write(self) -> None:
        try:
            done = self._lane.flush()
        except ConnectionError:
            done = True
        if done:
            self._writing = False
            self._loop.remove_writer(self._descriptor)

    def drain(self) -> None:
        """Take in all that has come; of a peer that is gone, what it said before it went."""
        while not self._closed and self._read():
            pass

    def _read(self) -> bool:
        try:
            messages = self._lane.receive()
        except ConnectionError:
            self.close()
            self._on_gone()
            return False
        for first in range(0, len(messages), MOST_FRAMES):
            if self._closed:
                return False
            self._on_messages(messages[first : first + MOST_FRAMES])
        return bool(messages)
