"""Pages in a browser: what one of another site may not set going.

A browser lets any page send a plain POST, or a GET for an image, to a server on the user's own
machine. The page cannot read the answer, but the work is done. So where no key is asked for, such
requests are refused, unless their origin was named.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from .answers import error_answer
from .errors import HttpError
from .guard import ADMIN_PATHS
from .state import HttpState

_HARMLESS = frozenset(("GET", "HEAD", "OPTIONS"))


class OwnPages:
    """Refuses with 403. ``origins`` are those that may call; ``*`` is all of them."""

    def __init__(self, app: ASGIApp, state: HttpState, origins: Collection[str]) -> None:
        self._app = app
        self._state = state
        self._origins = frozenset(origin.encode() for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._refuses(scope):
            error = HttpError(403, "pages of this origin may not call; see --cors-origin")
            await error_answer(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refuses(self, scope: Scope) -> bool:
        if self._state.keys or b"*" in self._origins:
            return False  # a page holds no key unless it was given one
        if scope["method"] in _HARMLESS and scope["path"] not in ADMIN_PATHS:
            return False
        headers: dict[bytes, bytes] = dict(scope["headers"])
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
        if origin in self._origins:
            return False
        if site is not None:  # the browser says it, and no page can
            return site not in (b"same-origin", b"none")
        return origin is not None and origin.partition(b"://")[2] != headers.get(b"host")
