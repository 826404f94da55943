"""The gateway's ZMQ service: clients' messages in, programs run, their events out."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import zmq

from ..program.events import Done, Event
from ..program.instructions import Instruction, Program
from ..program.interpreter import Interpreter
from ..program.limits import Limits
from ..protocol.codec import Codec
from ..protocol.errors import AbortedError, BackendError, ErrorInfo, ProgramError, RametError
from ..protocol.messages import (
    PROTOCOL_VERSION,
    AbortGenerate,
    AppendProgram,
    CancelProgram,
    ClientMessage,
    Control,
    ControlReply,
    GatewayMessage,
    Generate,
    Generated,
    GenerateFailed,
    Hello,
    OpenProgram,
    ProgramEvents,
    Refused,
    RegisterProgram,
    Welcome,
)
from .client import Client
from .context import EngineExecutor
from .control import flush_cache, server_info
from .generate import generate
from .running import RunningProgram
from .wire import Wire

log = logging.getLogger(__name__)

RETRY_S = 0.005
PROBE_S = 1.0

_encoder = msgspec.msgpack.Encoder()
_programs = msgspec.msgpack.Decoder(Program)
_instructions = msgspec.msgpack.Decoder(list[Instruction])


class ServiceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on what one client may ask of the service."""

    message_bytes: int = 64 << 20
    buffered_bytes: int = 32 << 20
    programs: int = 10_000
    registered: int = 1_000
    requests: int = 10_000
    program: Limits = Limits()


class Service:
    """Serves clients on a bound ROUTER socket. Lives on one asyncio loop; make it inside that loop.

    A message that is malformed, too large or out of place is answered with `Refused` and a log
    line. A client that is gone has its programs cancelled and its work in the engine aborted.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        executor: EngineExecutor,
        *,
        model: str,
        version: str = "",
        tokenizer_folder: str | None = None,
        api_key: str | None = None,
        limits: ServiceLimits | None = None,
    ) -> None:
        self.executor = executor
        self.model = model
        self.version = version
        self._tokenizer_folder = tokenizer_folder
        self._api_key = api_key
        self._limits = limits or ServiceLimits()
        self._codec: Codec[ClientMessage] = Codec(ClientMessage, self._limits.message_bytes)
        self._clients: dict[bytes, Client] = {}
        self._numbers = itertools.count(1)
        self._draining = False
        self._blocked: set[Client] = set()
        self._loop = asyncio.get_running_loop()
        self._wire = Wire(socket, self._on_frames)
        self._probe_timer = self._loop.call_later(PROBE_S, self._probe)
        self._retry_timer: asyncio.TimerHandle | None = None
        self._handlers: dict[type, Callable[[Client, Any], None]] = {
            OpenProgram: self._open,
            RegisterProgram: self._register,
            AppendProgram: self._append,
            CancelProgram: self._cancel,
            Generate: self._generate,
            AbortGenerate: self._abort,
            Control: self._control,
        }

    @property
    def programs(self) -> int:
        """Programs that run now."""
        return sum(len(client.programs) for client in self._clients.values())

    @property
    def clients(self) -> int:
        return len(self._clients)

    async def close(self, drain_s: float = 0.0) -> None:
        """Take no more work, give what runs ``drain_s`` seconds, then cancel it and close."""
        self._draining = True
        deadline = self._loop.time() + drain_s
        while self._loop.time() < deadline and any(c.busy for c in self._clients.values()):
            await asyncio.sleep(0.01)
        waits = [w for c in self._clients.values() for w in c.drop("the server is shutting down")]
        if waits:
            await asyncio.wait(waits, timeout=2.0)
        await asyncio.sleep(0)  # programs announce their last events one turn later
        self._probe_timer.cancel()
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        self._wire.close(linger_ms=200)

    # --- frames ---

    def _on_frames(self, frames: list[bytes]) -> None:
        client = self._clients.get(frames[0])
        if client is None:
            client = self._clients[frames[0]] = Client(frames[0], self._wire)
        try:
            if len(frames) != 2:
                raise BackendError(f"a message is one frame, not {len(frames) - 1}")
            self._on_message(client, self._codec.decode(frames[1]))
        except RametError as error:
            log.warning("refused a message of %s: %s", client.name or "a client", error)
            self._send(client, Refused(error=ErrorInfo.of(error)))
        except Exception as error:
            log.exception("a message broke its handler")
            self._send(client, Refused(error=ErrorInfo.of(error)))

    def _on_message(self, client: Client, message: ClientMessage) -> None:
        if isinstance(message, Hello):
            self._hello(client, message)
        elif not client.welcomed:
            raise BackendError("the first message of a connection must be hello")
        else:
            self._handlers[type(message)](client, message)

    def _send(self, client: Client, message: GatewayMessage) -> None:
        self._attempt(client, lambda: client.send(message))

    def _attempt(self, client: Client, action: Callable[[], None]) -> None:
        """Send something; a client that is gone loses its work, a slow one is tried again."""
        if self._clients.get(client.identity) is not client:
            return
        try:
            action()
        except zmq.ZMQError as error:
            log.info("%s is gone: %s", client.name or "a client", error)
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
            self._attempt(client, client.retry)
            if client.blocked and client.waiting_bytes > self._limits.buffered_bytes:
                log.warning("%s does not read; its work is cancelled", client.name or "a client")
                self._lose(client)

    def _lose(self, client: Client) -> None:
        self._clients.pop(client.identity, None)
        self._blocked.discard(client)
        client.drop("the client is gone")

    def _probe(self) -> None:
        """Send each client an empty list of events: sending is how a ROUTER learns who is gone."""
        self._probe_timer = self._loop.call_later(PROBE_S, self._probe)
        empty = msgspec.Raw(_encoder.encode([]))
        for client in list(self._clients.values()):
            if not client.blocked:
                pid = next(iter(client.programs), -1)
                self._send(client, ProgramEvents(pid=pid, events=empty))

    # --- messages, one method each ---

    def _hello(self, client: Client, message: Hello) -> None:
        if message.version != PROTOCOL_VERSION:
            raise BackendError(
                f"the client speaks protocol version {message.version},"
                f" this server speaks version {PROTOCOL_VERSION}"
            )
        given = (message.api_key or "").encode("utf-8", "replace")
        if self._api_key is not None and not hmac.compare_digest(given, self._api_key.encode()):
            raise BackendError("the API key is missing or wrong")
        client.welcomed = True
        client.name = message.client[:100]
        welcome = Welcome(
            version=PROTOCOL_VERSION,
            server=f"ramet {self.version}".strip(),
            model=self.model,
            context_length=self.executor.context_length,
            tokenizer=self._tokenizer_folder,
        )
        self._send(client, welcome)

    def _open(self, client: Client, message: OpenProgram) -> None:
        if message.pid in client.programs:
            raise ProgramError(f"program {message.pid} is open already")
        try:
            if self._draining:
                raise BackendError("the server is shutting down")
            if len(client.programs) >= self._limits.programs:
                raise ProgramError(f"more than {self._limits.programs} programs at a time")
            program = self._program(client, message)
        except RametError as error:
            done = msgspec.Raw(_encoder.encode([Done(ErrorInfo.of(error))]))
            self._send(client, ProgramEvents(pid=message.pid, events=done))
            return

        def make(emit: Callable[[list[Event]], None]) -> Interpreter:
            return Interpreter(
                self.executor,
                emit,
                program=next(self._numbers),
                sampling={**program.sampling, **message.sampling},
                args=message.args,
                stream=message.stream,
                limits=self._limits.program,
                cache_salt=message.cache_salt,
            )

        def ready(running: RunningProgram) -> None:
            self._attempt(client, lambda: client.send_events(running))

        running = RunningProgram(message.pid, make, ready)
        client.programs[message.pid] = running
        self._feed(running, program.instructions, message.closed)

    def _feed(self, running: RunningProgram, instructions: Any, closed: bool) -> None:
        try:
            running.feed(instructions, closed)
        except ProgramError as error:
            log.info("a program was refused: %s", error)

    def _program(self, client: Client, message: OpenProgram) -> Program:
        if message.key is None:
            return _decoded(_programs, message.program) if bytes(message.program) else Program()
        program = client.registered.get(message.key)
        if program is None:
            raise ProgramError(f"no program is registered under {message.key}")
        return program

    def _register(self, client: Client, message: RegisterProgram) -> None:
        if len(client.registered) >= self._limits.registered:
            raise ProgramError(f"more than {self._limits.registered} registered programs")
        client.registered[message.key] = _decoded(_programs, message.program)

    def _append(self, client: Client, message: AppendProgram) -> None:
        running = client.programs.get(message.pid)
        if running is None:  # it ended while this was on its way
            return
        try:
            instructions = _decoded(_instructions, message.instructions)
        except ProgramError as error:
            running.cancel(error.message)
            return
        self._feed(running, instructions, message.closed)

    def _cancel(self, client: Client, message: CancelProgram) -> None:
        if (running := client.programs.get(message.pid)) is not None:
            running.cancel()

    def _generate(self, client: Client, message: Generate) -> None:
        key = f"generate {message.rid}"
        if key in client.tasks:
            error = ProgramError(f"request {message.rid!r} is running already")
            self._send(client, GenerateFailed(rid=message.rid, error=ErrorInfo.of(error)))
            return

        async def work() -> None:
            reply = await self._generated(client, message)
            client.tasks.pop(key, None)  # first, as the answer may be asked again at once
            self._send(client, reply)

        self._spawn(client, key, work())

    async def _generated(self, client: Client, message: Generate) -> Generated | GenerateFailed:
        try:
            if self._draining or len(client.tasks) > self._limits.requests:
                raise BackendError("the server takes no more requests now")
            number = next(self._numbers)
            return await generate(
                self.executor, message, number, lambda piece: self._send(client, piece)
            )
        except asyncio.CancelledError:
            error = ErrorInfo.of(AbortedError("the request was aborted"))
        except Exception as failure:
            if not isinstance(failure, RametError):
                log.exception("a request broke")
            error = ErrorInfo.of(failure)
        return GenerateFailed(rid=message.rid, error=error)

    def _abort(self, client: Client, message: AbortGenerate) -> None:
        if (task := client.tasks.get(f"generate {message.rid}")) is not None:
            task.cancel()

    def _control(self, client: Client, message: Control) -> None:
        async def work() -> None:
            try:
                if message.op == "flush_cache":
                    data = await flush_cache(self.executor.engine)
                else:
                    data = await server_info(self)
            except Exception as error:
                reply = ControlReply(id=message.id, error=ErrorInfo.of(error))
            else:
                reply = ControlReply(id=message.id, data=data)
            self._send(client, reply)

        self._spawn(client, f"control {message.id}", work())

    def _spawn(self, client: Client, key: str, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        client.tasks[key] = task

        def ended(_: object) -> None:
            if client.tasks.get(key) is task:
                del client.tasks[key]

        task.add_done_callback(ended)


def _decoded(decoder: msgspec.msgpack.Decoder[Any], data: msgspec.Raw) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ProgramError(f"malformed program: {str(error)[:200]}") from None
