"""A lean HTTP client that offers load and writes down when each piece of an answer came.

Nothing is parsed while the load runs: at thousands of events a second whoever measures must not be
what is measured."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ramet.runtime.protocol import BackendError

_LAST_CHUNK = b"0\r\n\r\n"


@dataclass(slots=True)
class Reply:
    """What came back for one request; times are on the monotonic clock."""

    sent: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list[tuple[float, bytes]])
    failure: str | None = None

    @property
    def raw(self) -> bytes:
        return b"".join(data for _, data in self.pieces)

    @property
    def status(self) -> int:
        return int(self.raw[9:12]) if self.pieces and self.failure is None else 0

    @property
    def ended(self) -> float:
        return self.pieces[-1][0] if self.pieces else self.sent

    def body(self) -> bytes:
        """The body, out of its chunks."""
        head, _, rest = self.raw.partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" not in head.lower():
            return rest
        return b"".join(data for _, data in _chunks(rest))

    def events(self) -> list[tuple[float, dict[str, Any]]]:
        """Server-sent events that hold JSON, each with the time at which its last byte came."""
        head, _, rest = self.raw.partition(b"\r\n\r\n")
        ends: list[tuple[int, float]] = []
        total = -len(head) - 4
        for at, data in self.pieces:
            total += len(data)
            ends.append((total, at))
        found: list[tuple[float, dict[str, Any]]] = []
        place = 0
        for end, data in _chunks(rest):
            while ends[place][0] < end:
                place += 1
            found.extend(
                (ends[place][1], json.loads(event[6:]))
                for event in data.split(b"\n\n")
                if event.startswith(b"data: {")
            )
        return found


def _chunks(rest: bytes) -> list[tuple[int, bytes]]:
    """Of a chunked body: where each chunk ends, and what it holds."""
    found: list[tuple[int, bytes]] = []
    at = 0
    while at < len(rest):
        line = rest.index(b"\r\n", at)
        size = int(rest[at:line], 16)
        if not size:
            break
        begin = line + 2
        found.append((begin + size, rest[begin : begin + size]))
        at = begin + size + 2
    return found


class _Connection(asyncio.Protocol):
    """One kept-alive connection with one request on its way at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._reply: Reply | None = None
        self._done: asyncio.Future[None] | None = None
        self._left = -1  # bytes of a body of known length that are to come; -1: chunked or unknown

    @property
    def usable(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    async def ask(self, data: bytes) -> Reply:
        assert self.transport is not None
        self._left = -1
        self._done = asyncio.get_running_loop().create_future()
        self._reply = Reply(time.monotonic())
        self.transport.write(data)
        await self._done
        return self._reply

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        reply = self._reply
        if reply is None:
            return
        reply.pieces.append((time.monotonic(), data))
        if len(reply.pieces) == 1:
            head, _, rest = data.partition(b"\r\n\r\n")
            _, found, length = head.lower().partition(b"content-length: ")
            if found:
                self._left = int(length.split(b"\r\n")[0]) - len(rest)
        elif self._left >= 0:
            self._left -= len(data)
        if self._left == 0 or (self._left < 0 and data.endswith(_LAST_CHUNK)):
            self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"the connection closed ({exc})" if exc else "the connection closed")

    def _end(self, failure: str | None) -> None:
        if self._done is not None and not self._done.done() and self._reply is not None:
            self._reply.failure = failure
            self._done.set_result(None)


class Load:
    """Sends requests to one server. Use it inside a loop; `close` it."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BackendError(f"{url!r} is no address of an HTTP server")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/")
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._headers = f"Host: {parts.netloc}\r\n{key}Content-Type: application/json\r\n"
        self._idle: list[_Connection] = []

    def request(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """A request's bytes: POST with a body, GET without. Made before the load begins."""
        data = b"" if body is None else json.dumps(body).encode()
        method = "GET" if body is None else "POST"
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}"
        return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data

    async def ask(self, request: bytes) -> Reply:
        """Send one now. Raises `BackendError` when the server cannot be reached."""
        connection = self._idle.pop() if self._idle else None
        if connection is None or not connection.usable:
            loop = asyncio.get_running_loop()
            try:
                _, connection = await loop.create_connection(
                    _Connection, self._host, self._port, ssl=self._tls
                )
            except OSError as error:
                raise BackendError(
                    f"no server answers at {self._host}:{self._port}: {error}"
                ) from None
        reply = await connection.ask(request)
        if connection.usable:
            self._idle.append(connection)
        return reply

    async def run(
        self,
        requests: Sequence[bytes],
        *,
        concurrency: int | None = None,
        rate: float | None = None,
        seed: int = 0,
        on_reply: Callable[[Reply], None] | None = None,
    ) -> list[Reply]:
        """Send all; replies come in the requests' order. At most ``concurrency`` are on their way;
        with ``rate`` they are sent at that many a second on average, at random (Poisson)."""
        replies: list[Reply | None] = [None] * len(requests)
        free = asyncio.Semaphore(concurrency or len(requests) or 1)
        rng = random.Random(seed)

        async def one(place: int, request: bytes) -> None:
            async with free:
                reply = replies[place] = await self.ask(request)
            if on_reply is not None:
                on_reply(reply)

        tasks: list[asyncio.Task[None]] = []
        try:
            due = time.monotonic()
            for place, request in enumerate(requests):
                if rate:
                    due += rng.expovariate(rate)
                    await asyncio.sleep(max(0.0, due - time.monotonic()))
                tasks.append(asyncio.create_task(one(place, request)))
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return [reply for reply in replies if reply is not None]

    def close(self) -> None:
        for connection in self._idle:
            if connection.transport is not None:
                connection.transport.close()
        self._idle.clear()
