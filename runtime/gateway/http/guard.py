"""The first thing a request meets: bounds on its headers, and the key."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from .answers import error_answer
from .errors import HttpError
from .state import HttpState

OPEN_PATHS = frozenset(("/health", "/ready", "/metrics"))
"""Asked by probes and scrapers, which hold no key; they tell nothing of what clients do."""


class Guard:
    """Refuses with 431 and 401. The key is compared in constant time."""

    def __init__(self, app: ASGIApp, state: HttpState) -> None:
        self._app = app
        self._state = state
        self._key = None if state.api_key is None else state.api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except HttpError as error:
            await error_answer(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        limits = self._state.limits
        size = sum(len(name) + len(value) for name, value in headers)
        if len(headers) > limits.headers or size > limits.header_bytes:
            raise HttpError(431, "the headers are too many or too large")
        if self._key is None or scope["path"] in OPEN_PATHS:
            return
        given = [value for name, value in headers if name == b"authorization"]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        right = hmac.compare_digest(key.strip(), self._key)
        if scheme.lower() != b"bearer" or not right:
            raise HttpError(
                401, "the API key is missing or wrong", headers={"WWW-Authenticate": "Bearer"}
            )
