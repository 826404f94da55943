"""A bound on how deep JSON may nest that is walked here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import bad

MOST_LEVELS = 100


def check_depth(value: Any, what: str, param: str) -> None:
    """Raises `HttpError` for a value that nests deeper than `MOST_LEVELS`."""
    level = [value] if isinstance(value, Mapping | list) else []
    for _ in range(MOST_LEVELS):
        level = [
            inner
            for item in level
            for inner in (item.values() if isinstance(item, Mapping) else item)
            if isinstance(inner, Mapping | list)
        ]
    if level:
        raise bad(f"{what} is nested over {MOST_LEVELS} levels deep", param)
