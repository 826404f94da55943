"""Bounds on how deep JSON may nest that is walked here, and on how much it may hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import bad

MOST_LEVELS = 100
MOST_VALUES = 1 << 16


def check_depth(value: Any, what: str, param: str) -> None:
    """Raises `HttpError` for a value that nests deeper than `MOST_LEVELS`, or holds more than
    `MOST_VALUES` others."""
    level = [value] if isinstance(value, Mapping | list) else []
    values = 0
    for _ in range(MOST_LEVELS):
        values += sum(map(len, level))
        if values > MOST_VALUES:
            raise bad(f"{what} holds over {MOST_VALUES} values", param)
        level = [
            inner
            for item in level
            for inner in (item.values() if isinstance(item, Mapping) else item)
            if isinstance(inner, Mapping | list)
        ]
    if level:
        raise bad(f"{what} is nested over {MOST_LEVELS} levels deep", param)
