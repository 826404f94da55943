"""The first thing a request meets: bounds on its headers, and the key."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from .. import origin
from .answers import error_answer
from .errors import HttpError
from .state import HttpState

OPEN_PATHS = frozenset(("/health", "/health_generate", "/ready"))
"""Asked by probes, which hold no key; they tell nothing of what clients do."""
METRICS_PATHS = frozenset(("/metrics",))
"""Open, unless there is a key for them."""
ADMIN_PATHS = frozenset(("/flush_cache", "/v1/cache/tree"))
"""What touches, or shows, everybody's work."""


class Guard:
    """Refuses with 431, 401 and 403. What a request sets going is its key's own, in the cache
    too."""

    def __init__(self, app: ASGIApp, state: HttpState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            owner = self._owner(scope)
        except HttpError as error:
            await error_answer(error)(scope, receive, send)
            return
        origin.begin(owner)
        await self._app(scope, receive, send)

    def _owner(self, scope: Scope) -> bytes:
        """The id of the key that the request comes with, empty where none is needed."""
        state, path = self._state, scope["path"]
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        size = sum(len(name) + len(value) for name, value in headers)
        if len(headers) > state.limits.headers or size > state.limits.header_bytes:
            raise HttpError(431, "the headers are too many or too large")
        if path in OPEN_PATHS or (path in METRICS_PATHS and not state.metrics_key):
            return b""
        keys = state.keys
        if path in METRICS_PATHS:
            keys = state.metrics_key
        elif path in ADMIN_PATHS and state.admin_key:
            keys = state.admin_key
        if not keys:
            return b""
        given = _bearer(headers)
        owner = keys.owner(given) or state.admin_key.owner(given)
        if owner is None:
            if path in ADMIN_PATHS and state.keys.owner(given) is not None:
                raise HttpError(403, f"{path} takes the admin key (--admin-key)")
            raise HttpError(
                401, "the API key is missing or wrong", headers={"WWW-Authenticate": "Bearer"}
            )
        return owner


def is_admin(state: HttpState, headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether a request may touch what is not its own: it holds the admin's key, or nobody needs
    any."""
    if state.admin_key:
        return state.admin_key.owner(_bearer(headers)) is not None
    return not state.keys


def _bearer(headers: list[tuple[bytes, bytes]]) -> bytes:
    given = [value for name, value in headers if name == b"authorization"]
    if len(given) != 1:
        return b""
    scheme, _, key = given[0].partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""
