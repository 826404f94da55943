"""From the bytes of a body to a checked form."""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from ..origin import set_priority
from .errors import RETRY_AFTER, HttpError, bad, cut
from .refused import note_unknown, refuse

Form = TypeVar("Form", bound=msgspec.Struct)

BODY_S = 60.0
"""A body takes no longer to come."""
MOST_COMING_BYTES = 1 << 30
"""Of all bodies that are on their way at the same time."""
BYTES_A_VALUE = 16
"""JSON grows in memory, and whatever looks at its values holds up everybody. So a body may have one
for every so many bytes that it may be large."""
FEW_VALUES = 4096
"""Always allowed."""
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_DISCARD_FACTOR = 16


class _Coming:
    bytes = 0


async def read_form(request: Request, form: type[Form], most_bytes: int) -> Form:
    """The body as ``form``. Raises `HttpError`: 413 for one above ``most_bytes`` or of too many
    values, 400 for what is not JSON, asks for what is not supported, or has a field of a wrong
    type."""
    data = await read_body(request, most_bytes)
    most = max(FEW_VALUES, most_bytes // BYTES_A_VALUE)
    if holds_more(data, most):
        raise HttpError(413, f"the body holds more than {most} values")
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise bad(f"the body is not valid JSON: {cut(str(error))}") from None
    if not isinstance(body, dict):
        raise bad("the body must be a JSON object")
    return convert(body, form)


def convert(body: dict[str, Any], form: type[Form]) -> Form:
    known = frozenset(form.__struct_fields__)
    refuse(body, known)
    note_unknown(body, known)
    set_priority(body.get("priority"))
    try:
        return msgspec.convert(body, form)
    except RecursionError:
        raise bad("the body is nested too deep") from None
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        name = re.split(r"[\[.]", path.rstrip("`"))[0] or None
        raise bad(f"{path.rstrip('`') or 'body'}: {cut(message)}", name) from None


def holds_more(data: bytes, most: int) -> bool:
    """Whether JSON has more than about ``most`` values. Fast, and nothing is made of it."""
    return _marks(data) > most and _marks(_STRING.sub(b"", data)) > most


def _marks(data: bytes) -> int:
    return data.count(b",") + data.count(b"[") + data.count(b"{")


async def read_body(request: Request, most_bytes: int) -> bytes:
    """What is too large is read and thrown away up to a point, so that a client which sends before
    it reads gets to see the answer."""
    parts: list[bytes] = []
    size = held = 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                if size <= most_bytes:
                    parts.append(part)
                    held += len(part)
                    _Coming.bytes += len(part)
                    if _Coming.bytes > MOST_COMING_BYTES:
                        raise HttpError(429, "too much is sent at a time", headers=RETRY_AFTER)
                else:
                    parts.clear()
                    if size > _DISCARD_FACTOR * most_bytes:
                        break
    except TimeoutError:
        raise HttpError(408, f"the body did not come within {BODY_S:g} s") from None
    except ClientDisconnect:
        raise HttpError(499, "the client went away") from None
    finally:
        _Coming.bytes -= held
    if size > most_bytes:
        raise HttpError(413, f"the body is larger than {most_bytes} bytes")
    return b"".join(parts)
