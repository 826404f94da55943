"""The gateway's ZMQ service: clients' messages in, programs run, their events out."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import msgspec
import zmq

from ..keys import Keys
from ..program.events import Done, Event
from ..program.instructions import Instruction, Program
from ..program.interpreter import Interpreter
from ..program.limits import Limits
from ..protocol.errors import AbortedError, BackendError, ErrorInfo, ProgramError, RametError
from ..protocol.lane import Listener
from ..protocol.messages import (
    PROTOCOL_VERSION,
    AbortGenerate,
    AppendProgram,
    CancelProgram,
    ClientMessage,
    Control,
    ControlReply,
    Generate,
    Generated,
    GenerateFailed,
    Hello,
    OpenProgram,
    ProgramEvents,
    RegisterProgram,
    Welcome,
)
from . import origin
from .client import Client
from .clients import Clients
from .control import explain_prompt, flush_cache, server_info
from .eager import begin
from .executor import EngineExecutor
from .generate import generate
from .running import RunningProgram

log = logging.getLogger(__name__)

LINGER_MS = 200
"""What was said before the end gets so long to go out."""
_encoder = msgspec.msgpack.Encoder()
_programs = msgspec.msgpack.Decoder(Program)
_instructions = msgspec.msgpack.Decoder(list[Instruction])


class ServiceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on what one client may ask of the service."""

    message_bytes: int = 64 << 20
    buffered_bytes: int = 32 << 20
    programs: int = 10_000
    registered: int = 10_000
    requests: int = 10_000
    program: Limits = Limits()


class Service:
    """Serves clients on a bound ROUTER socket. Lives on one asyncio loop; make it inside that loop.

    A message that is malformed, too large or out of place is answered with `Refused` and a log
    line; what is wrong with one program or request is told to that one.
    """

    def __init__(
        self,
        router: zmq.Socket[bytes],
        executor: EngineExecutor,
        *,
        model: str,
        version: str = "",
        tokenizer_folder: str | None = None,
        api_key: str | Iterable[str] | None = None,
        admin_key: str | None = None,
        limits: ServiceLimits | None = None,
        lanes: Listener | None = None,
        spin: float = 0.0,
    ) -> None:
        """Whoever holds ``admin_key`` needs no other; where it is given, only they may flush.
        ``lanes`` listens for clients of this machine that open lanes; they may wait awake for
        ``spin`` seconds."""
        self.executor = executor
        self.model = model
        self.version = version
        self._tokenizer_folder = tokenizer_folder
        self._keys, self._admin_key = Keys(api_key), Keys(admin_key)
        self._limits = limits or ServiceLimits()
        self._numbers = itertools.count(1)
        self._spin = spin
        self._draining = False
        self._loop = asyncio.get_running_loop()
        self._clients = Clients(
            router,
            self._on_message,
            self._limits.message_bytes,
            self._limits.buffered_bytes,
            lanes,
            executor.engine.looks_at,
        )
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
        return sum(len(client.programs) for client in self._clients)

    @property
    def clients(self) -> int:
        """Those connected to the socket. A lane is another way of one of them."""
        return self._clients.on_socket

    async def close(self, drain_s: float = 0.0) -> None:
        """Take no more work, give what runs ``drain_s`` seconds, then cancel it and close."""
        self._draining = True
        deadline = self._loop.time() + drain_s
        while self._loop.time() < deadline and any(c.busy for c in self._clients):
            await asyncio.sleep(0.01)
        waits = [w for c in self._clients for w in c.drop("the server is shutting down")]
        if waits:
            await asyncio.wait(waits, timeout=2.0)
        await asyncio.sleep(0)  # programs announce their last events one turn later
        await self._clients.flush(LINGER_MS / 1000)
        self._clients.close(LINGER_MS)

    def _on_message(self, client: Client, message: ClientMessage) -> None:
        if isinstance(message, Hello):
            self._hello(client, message)
        elif not client.welcomed:
            raise BackendError("the first message of a connection must be hello")
        else:
            with origin.of(client.origin):
                self._handlers[type(message)](client, message)

    # --- messages, one method each ---

    def _hello(self, client: Client, message: Hello) -> None:
        if message.version != PROTOCOL_VERSION:
            raise BackendError(
                f"the client speaks protocol version {message.version},"
                f" this server speaks version {PROTOCOL_VERSION}"
            )
        given = (message.api_key or "").encode("utf-8", "replace")
        admin = self._admin_key.owner(given)
        client.may_flush = not self._admin_key or admin is not None
        if self._keys:
            owner = self._keys.owner(given) or admin
            if owner is None:
                raise BackendError("the API key is missing or wrong")
            client.origin = origin.Origin(owner)
        with origin.of(client.origin):
            origin.set_priority(message.priority)
            client.origin = origin.current()
        client.welcomed = True
        client.name = "".join(filter(str.isprintable, message.client[:100]))
        welcome = Welcome(
            version=PROTOCOL_VERSION,
            server=f"ramet {self.version}".strip(),
            model=self.model,
            context_length=self.executor.context_length,
            tokenizer=self._tokenizer_folder,
            spin_seconds=self._spin,
        )
        self._clients.send(client, welcome)

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
            self._clients.send(client, ProgramEvents(pid=message.pid, events=done))
            return

        def ready(running: RunningProgram) -> None:
            self._clients.attempt(client, lambda: client.send_events(running))

        running = self.start(
            program,
            ready,
            pid=message.pid,
            args=message.args,
            sampling=message.sampling,
            stream=message.stream,
            cache_salt=message.cache_salt,
        )
        client.programs[message.pid] = running
        self._feed(running, program.instructions, message.closed)

    def start(
        self,
        program: Program,
        ready: Callable[[RunningProgram], None],
        *,
        pid: int = 0,
        args: dict[str, Any],
        sampling: dict[str, Any],
        stream: bool,
        cache_salt: str | None = None,
    ) -> RunningProgram:
        """Run a program with these arguments, ``sampling`` over its own. Its instructions are for
        the caller to feed."""

        def make(emit: Callable[[list[Event]], None]) -> Interpreter:
            return Interpreter(
                self.executor,
                emit,
                program=next(self._numbers),
                sampling={**program.sampling, **sampling},
                args=args,
                stream=stream,
                limits=self._limits.program,
                cache_salt=cache_salt,
            )

        return RunningProgram(pid, make, ready)

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
            self._clients.send(client, GenerateFailed(rid=message.rid, error=ErrorInfo.of(error)))
            return

        async def work() -> None:
            reply = await self._generated(client, message)
            client.tasks.pop(key, None)  # first, as the answer may be asked again at once
            self._clients.send(client, reply)

        def ended(task: asyncio.Task[None]) -> None:
            if task.cancelled():  # before it ran again, so that nothing in it could say so
                client.tasks.pop(key, None)
                self._clients.send(client, _aborted(message))

        # Most often it is in the engine when this returns, without a turn of the loop.
        task = begin(work())
        if task is not None:
            client.tasks[key] = task
            task.add_done_callback(ended)

    async def _generated(self, client: Client, message: Generate) -> Generated | GenerateFailed:
        try:
            if self._draining or len(client.tasks) >= self._limits.requests:
                raise BackendError("the server takes no more requests now")
            number = next(self._numbers)
            return await generate(
                self.executor, message, number, lambda piece: self._clients.send(client, piece)
            )
        except asyncio.CancelledError:
            return _aborted(message)
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
                    if not client.may_flush:
                        raise BackendError("flush_cache takes the admin key (--admin-key)")
                    data = await flush_cache(self.executor.engine)
                elif message.op == "explain":
                    data = await explain_prompt(self, message)
                else:
                    data = await server_info(self)
            except Exception as error:
                reply = ControlReply(id=message.id, error=ErrorInfo.of(error))
            else:
                reply = ControlReply(id=message.id, data=data)
            self._clients.send(client, reply)

        self._spawn(client, f"control {message.id}", work())

    def _spawn(
        self, client: Client, key: str, work: Coroutine[Any, Any, None]
    ) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        client.tasks[key] = task

        def ended(_: object) -> None:
            if client.tasks.get(key) is task:
                del client.tasks[key]

        task.add_done_callback(ended)
        return task


def _aborted(message: Generate) -> GenerateFailed:
    error = ErrorInfo.of(AbortedError("the request was aborted"))
    return GenerateFailed(rid=message.rid, error=error)


def _decoded(decoder: msgspec.msgpack.Decoder[Any], data: msgspec.Raw) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ProgramError(f"malformed program: {str(error)[:200]}") from None
