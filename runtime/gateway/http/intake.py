"""A request's head as it comes in: bounded, in bytes and in time, before it is whole."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from .errors import HttpError

HEAD_S = 60.0
"""A head takes no longer to come."""
LINGER_S = 2.0
"""Who was refused may still be sending: hung up on at once, it would not see the answer."""
_SLACK = 4096
"""For the request's line; a head a little too large gets its answer from the guard instead."""


def bounded(head_bytes: int) -> type[HttpToolsProtocol]:
    """uvicorn's protocol, which keeps all headers that a client sends for as long as it likes. This
    one answers 431 and hangs up once a head is larger than ``head_bytes``, and hangs up on who does
    not finish one. What is no HTTP is a 400 in the form of all errors."""
    limit = head_bytes + _SLACK

    class Bounded(HttpToolsProtocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._head: int | None = 0  # bytes so far; None inside of a body
            self._timer: asyncio.TimerHandle | None = None
            self._refused = False

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._have_head()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._refused:
                return
            if self._head is None:
                super().data_received(data)
                return
            # A head can end inside of what came, so that is fed up to the limit first.
            room = limit - self._head
            first, rest = data[:room], data[room:]
            self._head += len(first)
            super().data_received(first)
            if not rest or self.transport.is_closing():
                return
            if self._head is None:
                super().data_received(rest)
            else:
                self._refuse(HttpError(431, "the headers are too many or too large"))

        def send_400_response(self, msg: str) -> None:
            self._refuse(HttpError(400, msg.removesuffix(".")))

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._await_head()

        def on_headers_complete(self) -> None:
            self._head = None
            self._have_head()
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._head = 0
            super().on_message_complete()

        def _await_head(self) -> None:
            if self._timer is None:
                self._timer = self.loop.call_later(HEAD_S, self._no_head)

        def _no_head(self) -> None:
            self._timer = None
            if self._answering:  # it waits behind the request that is being answered
                self._await_head()
            elif self._head:
                self._refuse(HttpError(408, f"the headers did not come within {HEAD_S:g} s"))
            else:
                self.transport.close()

        @property
        def _answering(self) -> bool:
            cycle: Any = self.cycle
            return cycle is not None and not cycle.response_complete

        def _have_head(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _refuse(self, error: HttpError) -> None:
            self._refused = True
            self._have_head()
            cycle: Any = self.cycle
            if self._answering and (self._head is not None or cycle.response_started):
                cycle.keep_alive = False  # it would fall into that answer: hang up behind it
                return
            if self._head is None:  # wrong inside of a body: there is one answer to a request
                if cycle.response_complete:
                    self.transport.close()
                    return
                cycle.disconnected = True
                cycle.message_event.set()
            body = msgspec.json.encode(error.body)
            self.transport.write(
                STATUS_LINE[error.status]
                + b"content-type: application/json\r\nconnection: close\r\n"
                + b"content-length: %d\r\n\r\n%b" % (len(body), body)
            )
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self._timer = self.loop.call_later(LINGER_S, self.transport.close)

    return Bounded
