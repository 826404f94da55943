"""Numbers of a schema as doubles can hold them, since llguidance reads them as such.

A bound that no double equals moves inward, to one that is; a constant that would become another
number is refused. What llguidance makes of some bounds is wrong, and is said otherwise here.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any

from ..protocol.errors import GrammarError
from .checks_schema import may_be
from .schema_document import Node, pointer

_EXACT = 1 << 53
"""Integers up to it are doubles."""
_LARGEST = (1 << 63) - 1024
"""The largest double below the end of 64 bits, where llguidance's integers end."""
_LOWER = ("minimum", "exclusiveMinimum")
_UPPER = ("maximum", "exclusiveMaximum")
_STEP = Decimal("1e-12")
_MOST_PLACES = 6
_PLAIN_STEPS = (1, 2, 4, 5)
"""Of the last decimal: with these the library takes fewer decimals too."""


def lower_numbers(nodes: Iterable[Node], paths: Mapping[int, str]) -> None:
    """Change bounds in place; ``paths``: where the schema as it was given has a subschema, by
    identity. Raises `GrammarError` for numbers that cannot be honoured, naming their place."""
    schemas = [node for node in nodes if isinstance(node.schema, dict)]
    for node in schemas:
        _lower(node, paths.get(node.key, node.path))
    lows = sorted(_values(schemas, _LOWER))
    highs = sorted(_values(schemas, _UPPER))
    for node in schemas:
        _leave_integers(node, lows, highs)


def _lower(node: Node, path: str) -> None:
    schema = node.schema
    assert isinstance(schema, dict)
    for keyword in ("const", "enum"):
        if keyword in schema and not all(map(_is_exact, _numbers(schema[keyword]))):
            raise GrammarError(
                "a number this large is not supported: doubles do not hold it",
                where=pointer(path, keyword),
            )
    _lower_flags(schema)
    _lower_step(schema, pointer(path, "multipleOf"))
    for keyword in (*_LOWER, *_UPPER):
        bound = schema.get(keyword)
        if bound is not None and abs(bound) > _EXACT:
            schema[keyword] = _inward(schema, keyword, int(bound), pointer(path, keyword))


def _numbers(value: Any) -> Iterator[int | float]:
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, dict):
            todo += item.values()
        elif isinstance(item, list):
            todo += item
        elif isinstance(item, (int, float)) and not isinstance(item, bool):
            yield item


def _is_exact(number: float) -> bool:
    """Whether it is written as it is meant: by the shortest digits of its double."""
    if abs(number) <= _EXACT:
        return True
    return int(Decimal(repr(float(number)))) == int(number)


def _lower_flags(schema: dict[str, Any]) -> None:
    """``exclusiveMinimum: true`` of older drafts is about ``minimum``."""
    for keyword, plain in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        flag = schema.get(keyword)
        if isinstance(flag, bool):
            del schema[keyword]
            if flag and plain in schema:
                schema[keyword] = schema.pop(plain)


def _lower_step(schema: dict[str, Any], where: str) -> None:
    """Of a step such as 0.25 the library takes multiples with all of its decimals only, 1.50 and
    not 1.5: those with fewer are multiples of a larger step."""
    step = schema.get("multipleOf")
    if not isinstance(step, float):
        return
    if not _is_read(step):
        raise GrammarError(f"multiples of {step!r} are not supported: doubles blur it", where=where)
    if not may_be(schema, "number"):
        return
    exact = Decimal(repr(step)).normalize()
    places = -int(exact.as_tuple().exponent)
    count = int(exact.scaleb(places))
    if not 2 <= places <= _MOST_PLACES or count in _PLAIN_STEPS:
        return
    counts = {math.lcm(count, 10 ** (places - fewer)) for fewer in range(1, places + 1)}
    larger = [float(Decimal(each).scaleb(-places)) for each in sorted(counts)]
    options = [{"multipleOf": step}, *({"multipleOf": each} for each in larger if _is_read(each))]
    del schema["multipleOf"]
    schema["allOf"] = [*schema.get("allOf", ()), {"anyOf": options}]


def _is_read(step: float) -> bool:
    """Whether the library, which moves the point by multiplying doubles, sees the digits meant."""
    moved, places = step, 0
    while not moved.is_integer() and places <= 2 * _MOST_PLACES:
        moved, places = moved * 10, places + 1
    return moved == int(Decimal(repr(step)).scaleb(places))


def _inward(schema: dict[str, Any], keyword: str, bound: int, where: str) -> int:
    double = float(bound)
    upward = keyword in _LOWER
    if upward and int(double) < bound:
        double = math.nextafter(double, math.inf)
    elif not upward and int(double) > bound:
        double = math.nextafter(double, -math.inf)
    if "type" in schema and may_be(schema, "number"):
        return int(double)
    if (double if upward else -double) > _LARGEST:
        raise GrammarError("integers beyond 64 bits are not supported", where=where)
    return int(max(min(double, _LARGEST), -_LARGEST))


# --- exclusive bounds that are integers -----------------------------------------------------------


def _values(nodes: Iterable[Node], keywords: tuple[str, ...]) -> Iterator[float]:
    for node in nodes:
        assert isinstance(node.schema, dict)
        for keyword in keywords:
            if keyword in node.schema:
                yield node.schema[keyword]


def _leave_integers(node: Node, lows: list[float], highs: list[float]) -> None:
    """The library takes an exclusive bound that is an integer for an inclusive one, where the other
    bound lies before the next integer. The two may come together from different subschemas."""
    schema = node.schema
    assert isinstance(schema, dict)
    if not may_be(schema, "number"):
        return
    bound = schema.get("exclusiveMinimum")
    if bound is not None and bound == int(bound):
        place = bisect_right(highs, bound)
        if place < len(highs) and highs[place] < bound + 1:
            del schema["exclusiveMinimum"]
            schema["minimum"] = max(_beside(bound, highs[place]), schema.get("minimum", bound))
    bound = schema.get("exclusiveMaximum")
    if bound is not None and bound == int(bound):
        place = bisect_left(lows, bound) - 1
        if place >= 0 and lows[place] > bound - 1:
            del schema["exclusiveMaximum"]
            schema["maximum"] = min(_beside(bound, lows[place]), schema.get("maximum", bound))


def _beside(bound: float, other: float) -> float:
    """A number next to ``bound``, on the side of ``other`` and much nearer than it."""
    gap = Decimal(repr(other)) - Decimal(repr(bound))
    step = min(_STEP, Decimal(1).scaleb(abs(gap).adjusted() - 3))
    beside = float(Decimal(repr(bound)) + step.copy_sign(gap))
    return beside if beside != bound else math.nextafter(bound, other)
