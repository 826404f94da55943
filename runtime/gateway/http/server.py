"""The server's socket and its loop: bound before the model loads, drained at the end."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import ssl
from collections.abc import Generator, Sequence

import uvicorn
from starlette.middleware.cors import CORSMiddleware

from ...protocol.errors import BackendError, BadInputError
from .app import make_app
from .intake import bounded
from .pages import OwnPages
from .state import HttpState

log = logging.getLogger(__name__)

_BACKLOG = 2048
_KEEP_ALIVE_S = 75


def bind_http(host: str, port: int) -> socket.socket:
    """A bound TCP socket; port 0 takes a free one. Raises `BackendError`, `BadInputError`."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise BadInputError(f"host {host!r}: {error}", param="host") from None
    made = socket.socket(family, kind, proto)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _probe_peers(made)
        made.bind(address)
        made.listen(_BACKLOG)
        made.setblocking(False)
    except OSError as error:
        made.close()
        raise BackendError(f"cannot bind to http://{host}:{port}: {error.strerror}") from None
    return made


def _probe_peers(listening: socket.socket) -> None:
    """Have the system find out within a minute which peers are gone without a word. What a
    listening socket is told holds for its connections."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # elsewhere the system's own pace
            listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def tls_context(certfile: str | None, keyfile: str | None) -> ssl.SSLContext | None:
    """What to serve HTTPS with, ``None`` without a certificate. Raises `BadInputError`."""
    if certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certfile, keyfile, password=_no_password)
    except (OSError, ValueError) as error:
        raise BadInputError(
            f"cannot serve HTTPS with {certfile} and {keyfile or 'the key in it'}: {error}",
            param="ssl_certfile",
        ) from None
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted; nobody is there to be asked for its password")


class HttpServer:
    """Serves ``state`` on a bound socket. Make it inside the loop that it shall live on.

    Pages of ``cors_origins`` may call it from a browser (``*``: all pages)."""

    def __init__(
        self,
        listening: socket.socket,
        state: HttpState,
        *,
        tls: ssl.SSLContext | None = None,
        cors_origins: Sequence[str] = (),
    ) -> None:
        self.state = state
        host, port = listening.getsockname()[:2]
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        app = make_app(state)
        app.add_middleware(OwnPages, state=state, origins=cors_origins)
        if cors_origins:
            # Outside of what asks for the key: a browser's question before the request has none.
            app.add_middleware(
                CORSMiddleware,
                allow_origins=list(cors_origins),
                allow_methods=["GET", "POST", "PUT", "DELETE"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id", "Retry-After"],
            )
        config = uvicorn.Config(
            app,
            http=bounded(state.limits.header_bytes),
            reset_contextvars=True,
            ssl_context_factory=None if tls is None else lambda *_: tls,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            backlog=_BACKLOG,
        )
        self._server = _QuietServer(config)
        self._socket = listening
        self._task = asyncio.create_task(self._server.serve(sockets=[listening]))
        self._task.add_done_callback(_say_failure)

    async def started(self) -> None:
        """Returns when connections are answered."""
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.005)

    async def close(self, drain_s: float = 0.0) -> None:
        """Take no more work, give what runs ``drain_s`` seconds, then abort it and stop."""
        self.state.draining = True
        deadline = asyncio.get_running_loop().time() + drain_s
        while self.state.runs and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        for run in list(self.state.runs.values()):
            run.abort()
        self._server.config.timeout_graceful_shutdown = 2
        self._server.should_exit = True
        await asyncio.wait([self._task], timeout=5.0)
        self._task.cancel()
        self._socket.close()


class _QuietServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are the process's own business."""
        yield


def _say_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the HTTP server ended", exc_info=error)
