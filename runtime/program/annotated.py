"""What stands beside a type in ``Annotated``: bounds as annotated_types and pydantic write them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_NUMBERS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "multiple_of": "multipleOf",
}
_UNITS = {"string": "Length", "array": "Items", "object": "Properties"}


def bounds_of(metadata: Sequence[Any]) -> dict[str, Any]:
    """The bounds among what stands beside a type, by their names there. What is no bound, or none
    that JSON has, says nothing."""
    found: dict[str, Any] = {}
    for item in metadata:
        inner = getattr(item, "metadata", None)
        if isinstance(inner, (list, tuple)):  # of pydantic's Field
            found |= bounds_of(inner)  # type: ignore[arg-type]
        for name in _NUMBERS:
            value = getattr(item, name, None)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                found[name] = value
        for name in ("min_length", "max_length"):
            value = getattr(item, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                found[name] = value
        pattern = getattr(item, "pattern", None)
        if isinstance(pattern, re.Pattern):
            pattern = pattern.pattern
        if isinstance(pattern, str):
            found["pattern"] = pattern
    return found


def narrowed(schema: dict[str, Any], metadata: Sequence[Any]) -> dict[str, Any]:
    """The schema of a type within its bounds."""
    more: dict[str, Any] = {}
    for name, value in bounds_of(metadata).items():
        if name in _NUMBERS:
            more[_NUMBERS[name]] = value
        elif name == "pattern":
            more["pattern"] = value
        else:  # each says something of its own kind of value only
            more |= {name[:3] + unit: value for unit in _UNITS.values()}
    kind = schema.get("type")
    if isinstance(kind, str) and kind in _UNITS:
        others = {f"{end}{unit}" for end in ("min", "max") for unit in _UNITS.values()}
        others -= {f"{end}{_UNITS[kind]}" for end in ("min", "max")}
        more = {name: value for name, value in more.items() if name not in others}
    return {**schema, **more}
