"""Python types that JSON writes as text or as a number: dates, times, ids, decimals."""

from __future__ import annotations

import datetime
import decimal
import uuid
from collections.abc import Callable
from typing import Any

Reader = Callable[[Any], Any]
_TEXTS: dict[type, tuple[str, Callable[[str], Any]]] = {
    datetime.datetime: ("date-time", lambda text: datetime.datetime.fromisoformat(text.upper())),
    datetime.date: ("date", datetime.date.fromisoformat),
    datetime.time: ("time", lambda text: datetime.time.fromisoformat(text.upper())),
    uuid.UUID: ("uuid", uuid.UUID),
}


def scalar_schema(type_: type) -> dict[str, Any] | None:
    """The schema of such a type; None for others."""
    if type_ is decimal.Decimal:
        return {"type": "number"}
    return {"type": "string", "format": _TEXTS[type_][0]} if type_ in _TEXTS else None


def scalar_from(type_: type, value: Any, where: str) -> Any:
    """A decoded JSON value as one of such a type; None for other types. Raises ValueError saying
    what does not fit."""
    if type_ is decimal.Decimal:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{where}: {value!r} is no number")
        return decimal.Decimal(repr(value))
    if type_ not in _TEXTS:
        return None
    if not isinstance(value, str):
        raise ValueError(f"{where}: {value!r} is no {type_.__name__}")
    try:
        return _TEXTS[type_][1](value)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
