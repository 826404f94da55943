"""The way to an engine: a ZMQ socket, which tells whether it is there, and a lane beside it."""

from __future__ import annotations

from collections.abc import Callable

import zmq

from ..protocol.awake import Awake
from ..protocol.codec import MAX_MESSAGE_BYTES
from ..protocol.lane import connect
from ..protocol.lane_wire import LaneWire
from ..protocol.monitor import Monitor
from ..protocol.wire import Wire


class EngineLine:
    """Messages go over the lane while there is one, else over the socket. Lives on one asyncio
    loop; make it inside that loop.

    ``on_message`` is given what comes, ``on_there`` is called when the socket has found an engine,
    ``on_gone`` when it or the lane has lost it. After `heard` the loop stays awake for as long as
    `may_spin` said, ``spin`` seconds at most, as `Patience` has it.
    """

    def __init__(
        self,
        address: str,
        *,
        heartbeat_s: float,
        spin: float,
        on_message: Callable[[bytes], None],
        on_there: Callable[[], None],
        on_gone: Callable[[], None],
    ) -> None:
        self.address = address
        self._on_message = on_message
        self._on_there = on_there
        self._on_gone = on_gone
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(heartbeat_s * 250))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(heartbeat_s * 1000))
        self._spin = spin
        self._awake = Awake(0.0)
        self._lane: LaneWire | None = None
        self._wire = Wire(socket, lambda frames: on_message(frames[-1]))
        events = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED
        self._monitor = Monitor(socket, events, self._on_event)
        socket.connect(address)

    def post(self, data: bytes) -> None:
        """Send a message at the end of this turn of the loop, with the others of the turn."""
        if self._lane is not None:
            self._lane.post(data)
        elif not self._wire.socket.closed:
            self._wire.post(data)
        self._awake.touch()

    def send_now(self) -> None:
        """Do not wait for the end of this turn."""
        if self._lane is not None:
            self._lane.flush()

    def may_spin(self, seconds: float) -> None:
        """What the engine leaves to others: an engine on the CPU needs every core."""
        self._awake = Awake(min(seconds, self._spin))

    def heard(self) -> None:
        """What came may be followed by more."""
        self._awake.touch()

    def take_lane(self) -> bool:
        """From now on all goes over a new lane, if the engine has one. To the engine it is a
        gateway of its own, with requests, handles and credits. False where nothing changes."""
        if self._lane is not None:
            return False
        lane = connect(self.address, MAX_MESSAGE_BYTES)
        if lane is not None:
            self._lane = LaneWire(lane, self._on_lane, self._on_lane_gone)
        return lane is not None

    def leave_lane(self) -> None:
        """The engine drops all that came over it."""
        if self._lane is not None:
            self._lane.close()
            self._lane = None

    def close(self) -> None:
        """Idempotent."""
        self.leave_lane()
        self._monitor.close()
        self._wire.close()

    def _on_event(self, event: int) -> None:
        if event == zmq.Event.DISCONNECTED:
            self._on_gone()
        elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self._on_there()

    def _on_lane(self, messages: list[bytes]) -> None:
        for data in messages:
            self._on_message(data)

    def _on_lane_gone(self) -> None:
        self._lane = None
        self._on_gone()
