"""Whether no value matches two subschemas both: then ``oneOf`` of them is ``anyOf``."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from .schema_document import Document, Node, pointer
from .schema_negation import TYPES

_DEPTH = 6
SIZES = {
    "number": ("minimum", "maximum"),
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
}


def exclude(document: Document, a: Node, b: Node, depth: int = 0) -> bool:
    """True only where it is certain."""
    first, second = _parts(document, a), _parts(document, b)
    if not document.afford(len(first) * len(second)):
        return False
    values, others = _values(first), _values(second)
    if values is not None and others is not None:
        return not any(same(x, y) for x in values for y in others)
    for kind in _kinds(first) & _kinds(second):
        if kind in SIZES:
            apart = _bounds(first, kind).apart(_bounds(second, kind))
        else:
            apart = kind == "object" and depth < _DEPTH
            apart = apart and _members_exclude(document, first, second, depth)
        if not apart:
            return False
    return True


def integers_only(document: Document, node: Node) -> bool:
    """Whether no number with a fraction can match."""
    parts = _parts(document, node)
    for part in parts:
        if isinstance(part.schema, bool):
            if not part.schema:
                return True
            continue
        types = part.schema.get("type", "number")
        if "number" not in ([types] if isinstance(types, str) else types):
            return True
    values = _values(parts)
    return values is not None and not any(
        isinstance(value, float) and not value.is_integer() for value in values
    )


def names_of(document: Document, node: Node) -> frozenset[str] | None:
    """The names of all members that there may be; None where there may be others."""
    for part in _parts(document, node):
        schema = part.schema
        if not isinstance(schema, dict) or schema.get("patternProperties"):
            continue
        if schema.get("additionalProperties") is False:
            return frozenset(schema.get("properties", ()))
    return None


class _Bounds(NamedTuple):
    """Of numbers, or of lengths."""

    low: float = -math.inf
    open_low: bool = False
    high: float = math.inf
    open_high: bool = False

    def apart(self, other: _Bounds) -> bool:
        """Whether nothing is within both."""
        return self._below(other) or other._below(self)

    def _below(self, other: _Bounds) -> bool:
        touches_not = self.open_high or other.open_low
        return self.high < other.low or (self.high == other.low and touches_not)


def _bounds(parts: list[Node], kind: str) -> _Bounds:
    """Of all values of a kind that can match the parts, as far as one keyword of them says it."""
    least, most = SIZES[kind]
    lows, highs = [(-math.inf, False)], [(math.inf, False)]
    for part in parts:
        if not isinstance(part.schema, dict):
            continue
        for found, keyword, is_open in (
            (lows, least, False),
            (highs, most, False),
            (lows, "exclusiveMinimum", True),
            (highs, "exclusiveMaximum", True),
        ):
            bound = part.schema.get(keyword)
            if is_open and (kind != "number" or isinstance(bound, bool)):
                continue  # a flag of older drafts only narrows the other bound
            if isinstance(bound, (int, float)):
                found.append((bound, is_open))
    values = _values(parts)
    if values is not None:
        sizes = [value if kind == "number" else len(value) for value in values
                 if _kind(value) == kind]  # fmt: skip
        if sizes:
            lows.append((min(sizes), False))
            highs.append((max(sizes), False))
    low, open_low = max(lows)
    high, open_high = min(highs, key=lambda bound: (bound[0], not bound[1]))
    return _Bounds(low, open_low, high, open_high)


def _members_exclude(document: Document, first: list[Node], second: list[Node], depth: int) -> bool:
    """One asks for a member that the other forbids, or both for one whose values differ."""
    mine, theirs = _required(first), _required(second)
    for names, parts in ((mine, second), (theirs, first)):
        if any(_forbids(part, name) for name in names for part in parts):
            return True
    for name in mine & theirs:
        for x in _members(first, name):
            if any(exclude(document, x, y, depth + 1) for y in _members(second, name)):
                return True
    return False


def _parts(document: Document, node: Node) -> list[Node]:
    """The schema and all that must hold with it in the same place."""
    found: dict[int, Node] = {}
    stack = [node]
    while stack:
        here = stack.pop()
        if here.key in found:
            continue
        found[here.key] = here
        if not isinstance(here.schema, dict):
            continue
        target = document.target(here)
        if target is not None:
            stack.append(target)
        for i, item in enumerate(here.schema.get("allOf", ())):
            stack.append(Node(pointer(here.path, "allOf", i), item, here.base))
    return list(found.values())


def _kinds(parts: list[Node]) -> set[str]:
    kinds: set[str] = set(TYPES)
    for part in parts:
        schema = part.schema
        if isinstance(schema, bool):
            kinds = kinds if schema else set()
            continue
        types = schema.get("type")
        if types is not None:
            listed = [types] if isinstance(types, str) else types
            kinds &= {"number" if name == "integer" else name for name in listed}
        values = _values([part])
        if values is not None:
            kinds &= {_kind(value) for value in values}
    return kinds


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    return {str: "string", list: "array"}.get(type(value), "object")


def _values(parts: list[Node]) -> list[Any] | None:
    """A list that holds every value that can match, if one is given."""
    for part in parts:
        if isinstance(part.schema, dict):
            if "const" in part.schema:
                return [part.schema["const"]]
            if "enum" in part.schema:
                return part.schema["enum"]
    return None


def _required(parts: list[Node]) -> set[str]:
    return {
        name
        for part in parts
        if isinstance(part.schema, dict)
        for name in part.schema.get("required", ())
    }


def _forbids(part: Node, name: str) -> bool:
    if not isinstance(part.schema, dict):
        return False
    declared = part.schema.get("properties", {})
    if name in declared:
        return declared[name] is False
    closed = part.schema.get("additionalProperties") is False
    return closed and not part.schema.get("patternProperties")


def _members(parts: list[Node], name: str) -> list[Node]:
    return [
        Node(pointer(part.path, "properties", name), part.schema["properties"][name], part.base)
        for part in parts
        if isinstance(part.schema, dict) and name in part.schema.get("properties", {})
    ]


def same(a: Any, b: Any) -> bool:
    """Equal as JSON: 1 is 1.0, but true is not 1."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b
