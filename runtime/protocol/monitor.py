"""What libzmq tells of a socket's connections: made, lost, refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from .wire import Wire

_names = itertools.count(1)


class Monitor:
    """Calls ``on_event`` with each of the ``events`` (`zmq.Event`) of ``socket``, on the running
    asyncio loop. Close it before the socket."""

    def __init__(
        self, socket: zmq.Socket[bytes], events: int, on_event: Callable[[int], None]
    ) -> None:
        # Not pyzmq's own name, which is made of the socket's descriptor: libzmq lets go of a closed
        # socket's name some time after its descriptor is another's.
        name = f"inproc://ramet-monitor-{next(_names)}"
        self._on_event = on_event
        self._socket = socket
        self._wire = Wire(socket.get_monitor_socket(events, name), self._on_frames)

    def close(self) -> None:
        """Idempotent."""
        # In this order: an event for a monitor that nobody reads any more would block libzmq's one
        # thread, and with it every other socket of the process.
        if not self._socket.closed:
            self._socket.disable_monitor()
        self._wire.close()

    def _on_frames(self, frames: list[bytes]) -> None:
        self._on_event(parse_monitor_message(frames)["event"])
