"""A ZMQ socket driven by the running asyncio loop: whole messages in, whole messages out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import zmq

_AT_ONCE = 256

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

    def _read(self) -> None:
        for _ in range(_AT_ONCE):
            if self._closed:
                return
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=True)
            except zmq.Again:
                return
            self._on_message(frames)
        self._look()
