"""Errors as HTTP says them: a status and ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...protocol.errors import (
    AbortedError,
    BackendError,
    GrammarError,
    ProgramError,
    QueueFullError,
    RametError,
)

MOST_CHARACTERS = 1000
RETRY_AFTER = {"Retry-After": "1"}

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "PayloadTooLargeError",
    429: "RateLimitError",
    431: "BadRequestError",
    499: "AbortedError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class HttpError(Exception):
    """What a request is answered with instead of what it asked for."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": cut(self.message, MOST_CHARACTERS),
                "type": _TYPES.get(self.status, "BadRequestError"),
                "param": self.param,
                "code": self.status,
            }
        }

    @classmethod
    def of(cls, error: BaseException) -> HttpError:
        """The answer to any exception; foreign ones tell nothing of what is inside."""
        if isinstance(error, HttpError):
            return error
        if not isinstance(error, RametError):
            return cls(500, "the server failed to handle this request")
        if isinstance(error, QueueFullError):
            return cls(429, error.message, headers=RETRY_AFTER)
        if isinstance(error, AbortedError):
            return cls(499, error.message)
        if isinstance(error, BackendError):
            return cls(503, error.message, headers=RETRY_AFTER)
        if isinstance(error, (ProgramError, GrammarError)):
            return cls(400, str(error), param=error.param)
        return cls(500, error.message)


def bad(message: str, param: str | None = None) -> HttpError:
    return HttpError(400, message, param=param)


def cut(text: str, most: int = 200) -> str:
    """Of what came in, no more than this goes back."""
    return text if len(text) <= most else text[: most - 1] + "…"
