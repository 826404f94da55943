"""All connected clients of one socket: whose message it is, who is slow, who is gone."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator

import msgspec
import zmq

from ..protocol.codec import Codec
from ..protocol.errors import BackendError, ErrorInfo, RametError
from ..protocol.lane import Lane, Listener, accept
from ..protocol.lane_wire import LaneWire
from ..protocol.messages import ClientMessage, GatewayMessage, ProgramEvents, Refused
from ..protocol.wire import MOST_FRAMES, Wire
from .client import Client

log = logging.getLogger(__name__)

RETRY_S = 0.005
PROBE_S = 1.0

_NO_EVENTS = msgspec.Raw(b"\x90")

OnMessage = Callable[[Client, ClientMessage], None]


class Clients:
    """Gives each valid message to ``on_message``; what that raises is answered with `Refused`.

    A client that cannot be reached, or that leaves more than ``buffered_bytes`` unread, is dropped:
    its programs are cancelled and its work in the engine aborted.
    """

    def __init__(
        self,
        router: zmq.Socket[bytes],
        on_message: OnMessage,
        message_bytes: int,
        buffered_bytes: int,
        listener: Listener | None = None,
        on_count: Callable[[int], None] = lambda _: None,
    ) -> None:
        """``listener``: where clients of this machine open lanes. ``on_count`` is told how many
        messages came together over one, and after them 0."""
        self._on_message = on_message
        self._buffered_bytes = buffered_bytes
        self._on_count = on_count
        self._message_bytes = message_bytes
        self._codec: Codec[ClientMessage] = Codec(ClientMessage, message_bytes)
        self._clients: dict[bytes | int, Client] = {}
        self._blocked: set[Client] = set()
        self._loop = asyncio.get_running_loop()
        self._wire = Wire(router, self._on_frames)
        self._listener = listener
        self._lanes: dict[bytes | int, LaneWire] = {}
        self._numbers = itertools.count(1)
        if listener is not None:
            self._loop.add_reader(listener.fileno(), self._accept)
        self._probe_timer = self._loop.call_later(PROBE_S, self._probe)
        self._retry_timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._clients)

    @property
    def on_socket(self) -> int:
        """All but those that speak over lanes."""
        return len(self._clients) - len(self._lanes)

    def __iter__(self) -> Iterator[Client]:
        return iter(list(self._clients.values()))

    async def flush(self, seconds: float) -> None:
        """Wait until those that speak over lanes have what was said to them, at most so long."""
        until = self._loop.time() + seconds
        while self._loop.time() < until and any(
            lane.blocked or self._clients[identity].blocked
            for identity, lane in self._lanes.items()
        ):
            await asyncio.sleep(RETRY_S)

    def close(self, linger_ms: int) -> None:
        """Close the socket; what it still holds gets ``linger_ms`` to go out."""
        self._probe_timer.cancel()
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        self._wire.close(linger_ms)
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()

    def send(self, client: Client, message: GatewayMessage) -> None:
        """Send a message, now or when the client reads again."""
        self.attempt(client, lambda: client.send(message))

    def attempt(self, client: Client, action: Callable[[], None]) -> None:
        """Send something; a client that is gone loses its work, a slow one is tried again."""
        if self._clients.get(client.identity) is not client:
            return
        try:
            action()
        except (zmq.ZMQError, ConnectionError) as error:
            log.info("client %s left: %s", client.name or "without a name", error)
            self._lose(client)
            return
        if client.blocked:
            self._blocked.add(client)
            if self._retry_timer is None:
                self._retry_timer = self._loop.call_later(RETRY_S, self._retry)

    def _retry(self) -> None:
        self._retry_timer = None
        blocked, self._blocked = self._blocked, set()
        for client in blocked:
            self.attempt(client, client.retry)
            if client.blocked and client.waiting_bytes > self._buffered_bytes:
                log.warning("%s does not read; its work is cancelled", client.name or "a client")
                self._lose(client)

    def _lose(self, client: Client) -> None:
        self._clients.pop(client.identity, None)
        self._blocked.discard(client)
        if (lane := self._lanes.pop(client.identity, None)) is not None:
            lane.close()
        client.drop("the client is gone")

    def _probe(self) -> None:
        """Send each client an empty list of events: sending is how a ROUTER learns who is gone. Of
        lanes the kernel tells, and who keeps one for later reads nothing meanwhile."""
        self._probe_timer = self._loop.call_later(PROBE_S, self._probe)
        for client in list(self._clients.values()):
            if not client.blocked and client.identity not in self._lanes:
                pid = next(iter(client.programs), -1)
                self.send(client, ProgramEvents(pid=pid, events=_NO_EVENTS))

    def _on_frames(self, frames: list[bytes]) -> None:
        identity = frames[0]
        client = self._clients.get(identity)
        if client is None:
            client = Client(identity, lambda data: self._wire.send([identity, data]))
            self._clients[identity] = client
        if not 2 <= len(frames) <= MOST_FRAMES + 1:
            error = BackendError(
                f"1 to {MOST_FRAMES} messages travel together, not {len(frames) - 1}"
            )
            self.send(client, Refused(error=ErrorInfo.of(error)))
            return
        self._take_all(client, frames[1:])

    def _accept(self) -> None:
        while (
            self._listener is not None
            and (lane := accept(self._listener, 2 * self._message_bytes)) is not None
        ):
            self._attend(lane)

    def _attend(self, lane: Lane) -> None:
        """A client that speaks over a lane: it is there from the first, and gone when that ends."""
        identity = next(self._numbers)

        def on_messages(messages: list[bytes]) -> None:
            self._on_count(len(messages))
            self._take_all(client, messages)
            self._on_count(0)

        wire = LaneWire(lane, on_messages, lambda: self._lose(client))
        client = Client(identity, wire.send)
        self._lanes[identity] = wire
        self._clients[identity] = client

    def _take_all(self, client: Client, messages: list[bytes]) -> None:
        for data in messages:
            if self._clients.get(client.identity) is not client:
                return  # an answer could not be sent: nobody would stop what runs for it from now
            self._take(client, data)

    def _take(self, client: Client, data: bytes) -> None:
        try:
            self._on_message(client, self._codec.decode(data))
        except RametError as error:
            log.warning("refused a message of %s: %s", client.name or "a client", error)
            self.send(client, Refused(error=ErrorInfo.of(error)))
        except Exception as error:
            log.exception("a message broke its handler")
            self.send(client, Refused(error=ErrorInfo.of(error)))
