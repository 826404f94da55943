"""A ZMQ socket driven by the running asyncio loop: whole messages in, whole messages out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import zmq

_AT_ONCE = 256
MOST_FRAMES = 256
"""Messages that travel together at most."""

OnMessage = Callable[[list[bytes]], None]


class Wire:
    """Calls ``on_message`` with the frames of each message. Sends never block.

    libzmq's descriptor is edge-triggered: it must be read until nothing is left, and a send may
    swallow the edge, so each send looks for messages as well.
    """

    def __init__(self, socket: zmq.Socket[bytes], on_message: OnMessage) -> None:
        self.socket = socket
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._scheduled = False
        self._posted: list[bytes] = []
        self._closed = False
        self._loop.add_reader(self._descriptor, self._read)
        self._look()

    def send(self, frames: Sequence[bytes]) -> bool:
        """False: the peer does not take more now. Raises `zmq.ZMQError` for an unknown peer."""
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=True)
        except zmq.Again:
            return False
        finally:
            if not self._closed and int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._look()
        return True

    def post(self, data: bytes) -> None:
        """Send a message at the end of this turn of the loop, together with the others posted in it
        as the frames of one: the peer takes each frame as a message."""
        self._posted.append(data)
        if len(self._posted) == 1:
            self._loop.call_soon(self._send_posted)

    def _send_posted(self) -> None:
        posted, self._posted = self._posted, []
        for first in range(0, len(posted), MOST_FRAMES):
            if not self._closed:
                self.send(posted[first : first + MOST_FRAMES])

    def close(self, linger_ms: int = 0) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._descriptor)
            self.socket.close(linger_ms)

    def _look(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._scheduled_read)

    def _scheduled_read(self) -> None:
        self._scheduled = False
        self._read()

    def drain(self) -> None:
        """Take in all that has come; of a peer that is gone, what it said before it went."""
        while self._take_one():
            pass

    def _read(self) -> None:
        for _ in range(_AT_ONCE):
            if not self._take_one():
                return
        self._look()

    def _take_one(self) -> bool:
        if self._closed:
            return False
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=True)
        except zmq.Again:
            return False
        self._on_message(frames)
        return True
