"""Answers on the wire: JSON in one piece or as events, each given up when the client goes away."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ...protocol.errors import RametError
from .errors import HttpError

log = logging.getLogger(__name__)

T = TypeVar("T")
_encode = msgspec.json.Encoder().encode
SEND_S = 60.0
"""A client that takes nothing for so long is as good as gone."""
DONE = b"data: [DONE]\n\n"


def json_answer(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(_encode(data), status, headers, media_type="application/json")


def error_answer(error: BaseException) -> Response:
    """Any exception as its answer; one that nobody raised on purpose also goes to the log."""
    if not isinstance(error, (HttpError, RametError)):
        log.error("a request broke", exc_info=error)
    known = HttpError.of(error)
    return json_answer(known.body, known.status, known.headers)


def event(data: Any) -> bytes:
    return b"data: " + _encode(data) + b"\n\n"


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client goes away. The body must have
    been read. Raises `HttpError` (499) then."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HttpError(499, "the client went away")
        if task.cancelled():
            raise HttpError(499, "the request was aborted")
        return task.result()
    finally:
        await _end(task, gone)


class Events(Response):
    """Server-sent events from a generator, and ``last`` after them. The generator is closed, and
    so what it runs is aborted, as soon as the client goes away."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], headers: dict[str, str], last: bytes = DONE
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", **headers})
        del self.headers["content-length"]
        self._events = events
        self._last = last
        self._sending: float | None = None
        """Since when the client has been given something that it does not take."""

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.ensure_future(self._send_all(send))
        gone = asyncio.ensure_future(_gone(receive))
        patience = asyncio.ensure_future(self._watch(task))
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not task.cancelled() and task.exception() is not None:
                log.info("a stream broke off: %r", task.exception())
        finally:
            await _end(task, gone, patience)
            await self._events.aclose()

    async def _watch(self, task: asyncio.Future[None]) -> None:
        """One timer a stream: one for each event would cost as much as the event."""
        while True:
            since = self._sending
            now = time.monotonic()
            if since is not None and now - since >= SEND_S:
                log.info("a stream broke off: its client took nothing for %g s", SEND_S)
                task.cancel()
                return
            await asyncio.sleep(SEND_S if since is None else since + SEND_S - now)

    async def _send_all(self, really_send: Send) -> None:
        async def send(message: Message) -> None:
            self._sending = time.monotonic()
            await really_send(message)
            self._sending = None

        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        try:
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except (HttpError, RametError) as error:
            tail = event(HttpError.of(error).body)
            await send({"type": "http.response.body", "body": tail, "more_body": True})
        except OSError:  # nobody is there to be told
            raise
        except Exception as error:
            log.exception("a stream broke")
            tail = event(HttpError.of(error).body)
            await send({"type": "http.response.body", "body": tail, "more_body": True})
        await send({"type": "http.response.body", "body": self._last})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
