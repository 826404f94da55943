"""Programs that run in a ramet server, reached over ZMQ."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ramet.runtime.program.instructions import Instruction, Program
from ramet.runtime.protocol import BackendError, BadInputError, ErrorInfo, RametError
from ramet.runtime.protocol.codec import raw
from ramet.runtime.protocol.messages import (
    AppendProgram,
    CancelProgram,
    OpenProgram,
    RegisterProgram,
    Welcome,
)

from . import _loop
from .base import Opening, Session
from .direct import elsewhere
from .generation import GeneratingBackend, Tell
from .prompts import Jobs

if TYPE_CHECKING:
    from .connection import Connection

CONNECT_SECONDS = 10.0
ALIVE_SECONDS = 0.2
IDLE_SECONDS = 0.5
FEW, SHORT_BYTES = 8, 1 << 20
"""Prompts, and all of their text or ids, that a caller sends by itself."""


class RemoteBackend(GeneratingBackend):
    """Talks to one gateway; connects at once, and anew at the next use after the server was gone.

    One that nobody holds any more closes it, when what runs has ended.

    Raises `BackendError` where no server answers. ``server_key`` is the server's CURVE public key,
    ``priority`` that of all that is asked for here: a number, lower goes first, or the name of a
    class (interactive, batch).
    """

    def __init__(
        self,
        address: str,
        api_key: str | None = None,
        *,
        server_key: str | None = None,
        timeout: float = CONNECT_SECONDS,
        priority: int | str | None = None,
    ) -> None:
        self.address = address
        self._priority = priority
        self._api_key = api_key
        self._server_key = server_key
        self._timeout = timeout
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._welcome: Welcome | None = None
        self._closed = False
        self._pid = os.getpid()
        self._inherited: list[Connection | None] = []
        self._tokenizer: Any = None
        self._unheld = weakref.finalize(self, bool)
        self.connection()

    @property
    def model(self) -> str:
        """The name of the model that runs there."""
        return self._welcome.model if self._welcome is not None else ""

    @property
    def context_length(self) -> int:
        """How many tokens a prompt and its answer may have together."""
        return self._welcome.context_length if self._welcome is not None else 0

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer: encode, decode, token_bytes, eos_ids, apply_chat_template. Needs
        the model's files on this machine."""
        if self._tokenizer is None:
            folder = self._welcome.tokenizer if self._welcome is not None else None
            if folder is None:
                raise BackendError(f"{self.address} does not tell where its tokenizer is")
            from ramet.runtime.gateway.tokenizer import Tokenizer
            from ramet.runtime.model.store import resolve

            self._tokenizer = Tokenizer.from_files(resolve(folder, fetch=False))
        return self._tokenizer

    def connection(self) -> Connection:
        """The living connection; made anew if the last one was lost."""
        if self._pid != os.getpid():
            self._leave_to_parent()
        found = self._connection
        if found is not None and found.lost is None:
            return found
        with self._lock:
            found = self._connection
            if self._closed:
                raise BackendError(f"this backend ({self.address}) was shut down")
            if found is None or found.lost is not None:
                found, self._welcome = self._connected()
                self._connection = found
                self._unheld.detach()
                self._unheld = weakref.finalize(self, _close_unheld, found, os.getpid())
                self._unheld.atexit = False
            return found

    def _leave_to_parent(self) -> None:
        """In a fork: the connection is the parent's, which would hang if a message of ours came
        between. It is never used nor freed here; a connection of our own is made."""
        self._inherited.append(self._connection)
        self._lock = threading.Lock()  # a thread that held it was not forked
        self._connection = None
        self._pid = os.getpid()

    def _connected(self) -> tuple[Connection, Welcome]:
        """Wait for a new connection, but only while there is a server to be waited for."""
        self._check_alive()
        future = _loop.submit(self._connect())
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    return future.result(ALIVE_SECONDS)
                self._check_alive()
        except BaseException:
            future.cancel()
            raise

    async def _connect(self) -> tuple[Connection, Welcome]:
        from .connection import Connection

        connection = Connection(self.address, self._api_key, self._server_key, self._priority)
        welcome = await connection.open(self._timeout)
        return connection, welcome

    def _check_alive(self) -> None:
        """Raise why connecting makes no sense."""

    def open(self, opening: Opening) -> Session:
        return RemoteSession(self, opening)

    def answered(self, jobs: Jobs, tell: Tell) -> bool:
        """A few short prompts, where the gateway runs on this machine."""
        size = sum(len(message.prompt or message.input_ids or ()) for message in jobs.messages)
        if len(jobs.messages) > FEW or size > SHORT_BYTES:
            return False
        connection = self.connection()
        line = connection.lines.take()
        if line is None:
            return False
        running, requests = connection.lines.running, connection.requests
        try:
            for message in jobs.messages:
                rid = message.rid
                if running.setdefault(rid, line) is not line or (
                    requests.setdefault(rid, elsewhere) is not elsewhere
                ):
                    raise BadInputError(f"rid {rid!r} is in use", param="rid")
            line.run(jobs.messages, tell, lambda: connection.lost)
        except BaseException:
            line.close()
            raise
        finally:
            # Ctrl-C may come anywhere: what is in `running` is ours, and leaves it last.
            for rid in [message.rid for message in jobs.messages]:
                if running.get(rid) is line:
                    if requests.get(rid) is elsewhere:
                        requests.pop(rid, None)
                    running.pop(rid, None)
        connection.lines.give(line)
        return True

    def abort(self, rid: str) -> None:
        connection = self.connection()
        line = connection.lines.running.get(rid) if isinstance(rid, str) else None  # pyright: ignore[reportUnnecessaryIsInstance]
        if line is not None:
            line.abort(rid)
        else:
            super().abort(rid)

    def flush_cache(self) -> None:
        _loop.run(self.connection().control("flush_cache"))

    def server_info(self) -> dict[str, Any]:
        return _loop.run(self.connection().control("server_info"))

    def explain(
        self, prompt: str, other: str | None = None, *, cache_salt: str | None = None
    ) -> dict[str, Any]:
        connection = self.connection()
        asked = {"prompt": prompt, "other": other, "cache_salt": cache_salt}
        return _loop.run(connection.control("explain", **asked))

    def shutdown(self) -> None:
        self._drop(ErrorInfo("backend", f"this backend ({self.address}) was shut down"))

    def _drop(self, error: ErrorInfo) -> None:
        self._closed = True
        if self._pid != os.getpid():
            self._leave_to_parent()
        connection = self._connection
        if connection is not None and connection.lost is None:
            _loop.soon(connection.close, error)


def _close_unheld(connection: Connection, pid: int) -> None:
    if pid == os.getpid() and connection.lost is None:
        _loop.soon(_close_idle, connection)


def _close_idle(connection: Connection) -> None:
    """Close what no backend uses any more, after its last program and stream."""
    if connection.programs or connection.requests:
        _loop.io_loop().call_later(IDLE_SECONDS, _close_idle, connection)
    else:
        connection.close(ErrorInfo("backend", f"nobody uses {connection.address} any more"))


class RemoteSession(Session):
    """Programs' messages are encoded by the caller and sent by the IO loop."""

    def __init__(self, backend: RemoteBackend, opening: Opening) -> None:
        super().__init__()
        self._backend = backend  # which closes the connection when nobody holds it
        self._connection = backend.connection()
        self._opening = opening
        self._pid = next(self._connection.numbers)
        self._opened = False

    def send(self, instructions: Sequence[Instruction], closed: bool) -> None:
        opening = self._opening
        if self._opened:
            data = raw(list(instructions))
            message = AppendProgram(pid=self._pid, instructions=data, closed=closed)
            _loop.soon(self._post, message)
            return
        fields: dict[str, Any] = {
            "pid": self._pid,
            "args": opening.args,
            "sampling": opening.sampling,
            "stream": opening.stream,
            "closed": closed,
            "cache_salt": opening.cache_salt,
        }
        if opening.registered is None:
            program = Program(instructions=tuple(instructions), name=opening.name)
            fields["program"] = raw(program)
        self._opened = True
        _loop.soon(self._open, fields)

    def cancel(self) -> None:
        if self._opened:
            _loop.soon(self._post, CancelProgram(pid=self._pid))

    def _open(self, fields: dict[str, Any]) -> None:
        if self._connection.lost is not None:
            self.store.fail(self._connection.lost)
            return
        self._connection.programs[self._pid] = self.store
        if self._opening.registered is not None:
            try:
                fields["key"] = self._key(self._opening.registered)
            except RametError as error:
                self._connection.programs.pop(self._pid, None)
                self.store.fail(ErrorInfo.of(error))
                return
        self._post(OpenProgram(**fields))

    def _key(self, program: Program) -> int:
        """The key under which the gateway knows a compiled program; told to it if need be."""
        known = self._connection.registered
        if id(program) not in known:
            key = next(self._connection.numbers)
            self._connection.send(RegisterProgram(key=key, program=raw(program)))
            known[id(program)] = (key, program)
        return known[id(program)][0]

    def _post(self, message: Any) -> None:
        if self._connection.lost is not None:
            self.store.fail(self._connection.lost)
            return
        try:
            self._connection.send(message)
        except RametError as error:
            self._connection.programs.pop(self._pid, None)
            self.store.fail(ErrorInfo.of(error))
            if not isinstance(message, OpenProgram):
                self._connection.send(CancelProgram(pid=self._pid))
