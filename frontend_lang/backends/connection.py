"""One connection to a gateway: the handshake, messages both ways, and noticing that it is gone."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from ramet.runtime.program.events import Done, Event
from ramet.runtime.protocol import BackendError, ErrorInfo
from ramet.runtime.protocol.codec import client_codec, gateway_codec
from ramet.runtime.protocol.lane import connect
from ramet.runtime.protocol.lane_wire import LaneWire
from ramet.runtime.protocol.messages import (
    PROTOCOL_VERSION,
    AbortGenerate,
    CancelProgram,
    ClientMessage,
    Control,
    ControlReply,
    Generated,
    GenerateFailed,
    Hello,
    ProgramEvents,
    Refused,
    Welcome,
)
from ramet.runtime.protocol.monitor import Monitor
from ramet.runtime.protocol.wire import Wire

from .direct import HELLO_SECONDS, MAX_ANSWER_BYTES, DirectLines
from .store import EventStore

HEARTBEAT_MS = 500
SILENCE_MS = 3500
MAX_MESSAGE_BYTES = 64 << 20
"""The largest message that a gateway takes."""

_LOST = zmq.Event.DISCONNECTED | zmq.Event.CLOSED
_REFUSED = (
    zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
)
_events: msgspec.msgpack.Decoder[list[Event]] = msgspec.msgpack.Decoder(list[Event])
OnGenerated = Callable[[Generated | ErrorInfo], object]


class Connection:
    """Lives in the IO loop; every method is called there. ``lost`` says why it is of no more use.

    When the server's socket closes, stops answering libzmq's heartbeats, or refuses a message,
    everything that waits here fails with a `BackendError`.
    """

    def __init__(
        self,
        address: str,
        api_key: str | None,
        server_key: str | None,
        priority: int | str | None = None,
    ) -> None:
        self.address = address
        self.priority = priority
        self.api_key = api_key
        self.lost: ErrorInfo | None = None
        self.programs: dict[int, EventStore] = {}
        self.requests: dict[str, OnGenerated] = {}
        self.registered: dict[int, tuple[int, object]] = {}
        self.numbers = itertools.count(1)
        self.lines = DirectLines(address, api_key, priority)
        self._controls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._welcome: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self._socket: zmq.Socket[bytes] = (
            zmq.Context[zmq.Socket[bytes]].instance().socket(zmq.DEALER)
        )
        self._set_options(server_key)
        self._lane: LaneWire | None = None
        self._wire = Wire(self._socket, self._on_frames)
        self._encrypts = server_key is not None
        self._hung_up = False
        """Whether something there took the connection and closed it before it welcomed us."""
        self._monitor = Monitor(self._socket, _LOST | _REFUSED, self._on_event)

    def _set_options(self, server_key: str | None) -> None:
        socket = self._socket
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        socket.setsockopt(zmq.HEARTBEAT_TTL, 15_000)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.IPV6, 1)
        if server_key is not None:
            public, secret = zmq.curve_keypair()
            socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
            socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, secret)

    async def open(self, timeout: float) -> Welcome:
        """Connect and shake hands. Raises `BackendError`: no answer, refused, not an address."""
        try:
            self._socket.connect(self.address)
        except zmq.ZMQError as error:
            self.close(ErrorInfo("backend", f"cannot connect to {self.address}: {error}"))
            raise BackendError(f"cannot connect to {self.address}: {error}") from None
        hello = Hello(
            version=PROTOCOL_VERSION, client="ramet", api_key=self.api_key, priority=self.priority
        )
        self.send(hello)
        try:
            welcome = await asyncio.wait_for(asyncio.shield(self._welcome), timeout)
            await self._take_lane(hello)
            return welcome
        except TimeoutError:
            message = f"no ramet server answers at {self.address} within {timeout:g} s"
            if self._hung_up:
                message += "; what listens there closes the connection (is it the HTTP port?)"
            self.close(ErrorInfo("backend", message))
            raise BackendError(message) from None
        except (BackendError, asyncio.CancelledError) as error:
            self.close(ErrorInfo.of(error))
            raise

    async def _take_lane(self, hello: Hello) -> None:
        """Whatever follows goes over a lane, where the server is on this machine and has one. The
        socket still tells when the server is gone."""
        lane = connect(self.address, MAX_ANSWER_BYTES)
        if lane is None:
            return
        welcomed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def on_messages(messages: list[bytes]) -> None:
            if welcomed.done():
                self._on_frames(messages)
                return
            for answer in map(gateway_codec.decode, messages):
                if isinstance(answer, (Welcome, Refused)):
                    welcomed.set_result(isinstance(answer, Welcome))
                    return  # nothing was asked before that another could answer

        def on_gone() -> None:
            if not welcomed.done():
                welcomed.set_result(False)
            elif self._lane is wire:
                self._lost()

        wire = LaneWire(lane, on_messages, on_gone)
        try:
            wire.post(client_codec.encode(hello))
            if await asyncio.wait_for(welcomed, HELLO_SECONDS):
                self._lane = wire
        except (TimeoutError, BackendError):
            pass
        finally:
            if self._lane is not wire:
                wire.close()

    def send(self, message: ClientMessage) -> None:
        """Queue a message. Raises `BackendError` for one too large to be taken."""
        data = client_codec.encode(message)
        if len(data) > MAX_MESSAGE_BYTES:
            raise BackendError(
                f"a message of {len(data)} bytes is too large to send; the limit is "
                f"{MAX_MESSAGE_BYTES}"
            )
        if self.lost is None:
            (self._lane or self._wire).post(data)

    async def control(self, op: Any, **asked: Any) -> dict[str, Any]:
        """Ask (``asked`` are more fields of `Control`), and wait for the answer."""
        if self.lost is not None:
            raise self.lost.exception()
        number = next(self.numbers)
        reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._controls[number] = reply
        self.send(Control(id=number, op=op, **asked))
        try:
            return await reply
        finally:
            self._controls.pop(number, None)

    def close(self, error: ErrorInfo) -> None:
        """Give up the connection: everything that waits fails with ``error``."""
        if self.lost is not None:
            return
        self.lost = error
        self.lines.close()
        self._fail_all(error)
        self._monitor.close()
        self._wire.close()
        if self._lane is not None:
            self._lane.close()

    def _fail_all(self, error: ErrorInfo) -> None:
        programs, self.programs = self.programs, {}
        requests, self.requests = self.requests, {}
        for store in programs.values():
            store.fail(error)
        for tell in list(requests.values()):  # callers on lanes add theirs
            tell(error)
        for future in (self._welcome, *self._controls.values()):
            if not future.done():
                future.set_exception(error.exception())
        if not self._welcome.cancelled():
            self._welcome.exception()  # seen: nobody need wait for it

    def _on_frames(self, frames: list[bytes]) -> None:
        for data in frames:
            if self.lost is not None:
                return
            try:
                self._take(gateway_codec.decode(data))
            except BackendError as error:
                self.close(ErrorInfo("backend", f"{self.address} spoke nonsense: {error}"))

    def _on_event(self, event: int) -> None:
        if event & _LOST:
            if not self._welcome.done():
                self._hung_up = self._hung_up or bool(event & zmq.Event.DISCONNECTED)
                return  # it is not up yet: libzmq tries again until the handshake's time-out
            self._wire.drain()
            self._lost()
            return
        if self._encrypts:
            why = (
                f"the ramet server at {self.address} refused the encrypted handshake (a wrong "
                "server_key, or a server without encryption)"
            )
        else:
            why = (
                f"what listens at {self.address} refused the handshake: it may want a server_key, "
                "or not be the ZMQ port of a ramet server (is it the HTTP port?)"
            )
        self.close(ErrorInfo("backend", why))

    def _lost(self) -> None:
        if self._lane is not None:
            self._lane.drain()
        why = "is gone: the connection was lost"
        self.close(ErrorInfo("backend", f"the ramet server at {self.address} {why}"))

    def _take(self, message: Any) -> None:
        if isinstance(message, ProgramEvents):
            self._program(message)
        elif isinstance(message, (Generated, GenerateFailed)):
            failed = isinstance(message, GenerateFailed)
            tell = self.requests.get(message.rid)
            if failed or message.done:
                self.requests.pop(message.rid, None)
            if tell is not None:
                tell(message.error if isinstance(message, GenerateFailed) else message)
        elif isinstance(message, ControlReply):
            reply = self._controls.get(message.id)
            if reply is not None and not reply.done():
                if message.error is not None:
                    reply.set_exception(message.error.exception())
                else:
                    reply.set_result(message.data)
        elif isinstance(message, Welcome):
            if not self._welcome.done():
                self._welcome.set_result(message)
        elif isinstance(message, Refused):
            self._refused(message.error)

    def _refused(self, error: ErrorInfo) -> None:
        """A refusal does not say of what: all that waits fails, as nobody may wait for ever, and is
        aborted, as nobody will read it."""
        if self._welcome.done():
            for pid in self.programs:
                self.send(CancelProgram(pid=pid))
            for rid in list(self.requests):  # callers on lanes add theirs meanwhile
                self.send(AbortGenerate(rid=rid))
        message = f"the ramet server at {self.address} refused: {error.message}"
        self._fail_all(ErrorInfo("backend", message, error.where, error.param))

    def _program(self, message: ProgramEvents) -> None:
        store = self.programs.get(message.pid)
        if store is None:
            return
        try:
            events = _events.decode(message.events)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise BackendError(f"malformed events: {error}") from None
        if events and isinstance(events[-1], Done):
            self.programs.pop(message.pid, None)
        store.feed(events)
