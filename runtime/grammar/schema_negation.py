"""The opposite of a schema, where other keywords can say it: for ``not``, ``if`` and ``oneOf``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .schema_document import Document, Node, Schema, pointer

TYPES = ("array", "boolean", "null", "number", "object", "string")
ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$schema", "$id", "$anchor", "$defs", "definitions", "example", "x-guidance"),
    )
)
_DEPTH = 8
_MOST = 16
_MOST_TEXT = 500
_ANY = "[\\s\\S]"


class Known(NamedTuple):
    """What is known of the values that an opposite need be right for."""

    whole: bool = False
    """No number has a fraction."""
    names: frozenset[str] | None = None
    """Objects have no members of other names."""


_NOTHING = Known()


def negate(
    document: Document, node: Node, depth: int = 0, *, known: Known = _NOTHING
) -> Schema | None:
    """A schema that just what this one refuses matches; None if it cannot be said,
    or not in short."""
    schema = node.schema
    if isinstance(schema, bool):
        return not schema
    if depth > _DEPTH or not document.afford(len(schema)):
        return None
    options: list[Schema] = []
    for keyword, value in schema.items():
        if keyword in ANNOTATIONS:
            continue
        option = _keyword(document, node, keyword, value, depth + 1, known)
        if option is None:
            return None
        if option is True:
            return True
        if option is not False:
            options.append(option)
    if not options:
        return False
    return options[0] if len(options) == 1 else {"anyOf": options}


def _keyword(
    document: Document, node: Node, keyword: str, value: Any, depth: int, known: Known
) -> Schema | None:
    if keyword in _BOUNDS:
        return _BOUNDS[keyword](value) if not isinstance(value, bool) else None
    match keyword:
        case "type":
            return _other_types([value] if isinstance(value, str) else value, known.whole)
        case "enum":
            return _other_values(value)
        case "const":
            return _other_values([value])
        case "required":
            if not value:
                return False
            lacking: list[Schema] = [{"properties": {name: False}} for name in value]
            return {"type": "object", "anyOf": lacking} if len(lacking) <= _MOST else None
        case "not":
            return value
        case "$ref":
            target = document.target(node)
            return None if target is None else negate(document, target, depth, known=known)
        case "allOf" | "anyOf":
            return _all(document, node, keyword, value, depth, known)
        case "properties":
            return _properties(document, node, value, depth)
        case "additionalProperties":
            return _others(node, value, known)
    return None


def _all(
    document: Document, node: Node, keyword: str, value: list[Schema], depth: int, known: Known
) -> Schema | None:
    if len(value) > _MOST:
        return None
    opposite = "anyOf" if keyword == "allOf" else "allOf"
    parts: list[Schema] = []
    for i, item in enumerate(value):
        inner = Node(pointer(node.path, keyword, i), item, node.base)
        part = negate(document, inner, depth, known=known)
        if part is None:
            return None
        parts.append(part)
    return {opposite: parts}


def _properties(
    document: Document, node: Node, value: dict[str, Schema], depth: int
) -> Schema | None:
    if len(value) > _MOST:
        return None
    options: list[Schema] = []
    for name, item in value.items():
        inner = Node(pointer(node.path, "properties", name), item, node.base)
        part = negate(document, inner, depth)
        if part is None:
            return None
        if part is not False:
            options.append({"type": "object", "required": [name], "properties": {name: part}})
    return {"anyOf": options} if options else False


def _others(node: Node, value: Any, known: Known) -> Schema | None:
    """Of a schema that takes no undeclared members: one is there, of those that there may be."""
    schema = node.schema
    assert isinstance(schema, dict)
    if value is True or value == {}:
        return False
    if value is not False or known.names is None or schema.get("patternProperties"):
        return None
    others = sorted(known.names - set(schema.get("properties", ())))
    if len(others) > _MOST:
        return None
    there: list[Schema] = [{"required": [name]} for name in others]
    return {"type": "object", "anyOf": there} if there else False


def _other_types(types: list[str], whole: bool) -> Schema | None:
    taken = set(types)
    if "integer" in taken and "number" not in taken:
        if not whole:
            return None  # numbers that are no integers: no keyword says that
        taken.add("number")
    left = [name for name in TYPES if name not in taken]
    return {"type": left} if left else False


def _other_values(values: list[Any]) -> Schema | None:
    """Other than these strings, numbers, booleans and null."""
    texts = {value for value in values if isinstance(value, str)}
    flags = {value for value in values if isinstance(value, bool)}
    numbers = {
        value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    if not all(value is None or isinstance(value, (bool, str, int, float)) for value in values):
        return None
    if sum(map(len, texts)) > _MOST_TEXT or len(numbers) > _MOST:
        return None
    touched = {"boolean"} if flags else set()
    touched |= {"string"} if texts else set()
    touched |= {"number"} if numbers else set()
    touched |= {"null"} if None in values else set()
    options: list[Schema] = [{"type": [name for name in TYPES if name not in touched]}]
    if flags and len(flags) < 2:
        options.append({"enum": [not next(iter(flags))]})
    if numbers:
        options += _between(sorted(numbers))
    if texts:
        options.append({"type": "string", "pattern": f"^(?:{_other_texts(texts)})$"})
    return {"anyOf": options}


def _between(numbers: list[float]) -> Iterator[Schema]:
    """All numbers but these, which ascend."""
    yield {"type": "number", "exclusiveMaximum": numbers[0]}
    for low, high in itertools.pairwise(numbers):
        yield {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
    yield {"type": "number", "exclusiveMinimum": numbers[-1]}


def _other_texts(texts: set[str]) -> str:
    """A regex for all texts but these: equal for some characters, then another, or too short or too
    long."""
    next_of: dict[str, set[str]] = {}
    for text in texts:
        for i in range(len(text) + 1):
            follows = next_of.setdefault(text[:i], set())
            if i < len(text):
                follows.add(text[i])
    options: list[str] = []
    for prefix, follows in sorted(next_of.items()):
        begin = "".join(map(_character, prefix))
        other = f"[^{''.join(map(_character, sorted(follows)))}]" if follows else _ANY
        options.append(f"{begin}{other}{_ANY}*")
        if prefix not in texts:
            options.append(begin)
    return "|".join(options)


def _character(char: str) -> str:
    return f"\\x{{{ord(char):x}}}"


def _at_most(kind: str, keyword: str) -> Callable[[Any], Schema | None]:
    return lambda value: {"type": kind, keyword: value - 1} if value >= 1 else False


def _at_least(kind: str, keyword: str) -> Callable[[Any], Schema | None]:
    return lambda value: {"type": kind, keyword: value + 1}


def _number(keyword: str) -> Callable[[Any], Schema | None]:
    return lambda value: {"type": "number", keyword: value}


_BOUNDS: dict[str, Callable[[Any], Schema | None]] = {
    "minimum": _number("exclusiveMaximum"),
    "maximum": _number("exclusiveMinimum"),
    "exclusiveMinimum": _number("maximum"),
    "exclusiveMaximum": _number("minimum"),
    "minLength": _at_most("string", "maxLength"),
    "maxLength": _at_least("string", "minLength"),
    "minItems": _at_most("array", "maxItems"),
    "maxItems": _at_least("array", "minItems"),
    "minProperties": _at_most("object", "maxProperties"),
    "maxProperties": _at_least("object", "minProperties"),
}
