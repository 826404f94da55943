"""What is wrong with a JSON schema, by keyword and path, before anything compiles it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from ..protocol.errors import GrammarError
from .checks_pattern import check_pattern
from .schema_document import IN_PLACE, LISTS, MAPS, ONE, Document, Node, children, pointer

MAX_DEPTH = 100
_DIGITS = 300
_HALF = re.compile(r"\\u[dD][89a-fA-F]")

TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
UNSUPPORTED = frozenset(
    (
        *("contains", "maxContains", "minContains", "uniqueItems", "not", "if", "then", "else"),
        *("dependentRequired", "dependentSchemas", "dependencies", "propertyNames"),
        *("unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
    )
)
"""Keywords that constrain, and that nothing here can enforce."""
FORMATS = frozenset(
    (
        *("date-time", "time", "date", "duration", "email", "hostname"),
        *("ipv4", "ipv6", "uri", "uuid", "unknown"),
    )
)
UNSUPPORTED_FORMATS = frozenset(
    (
        *("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference"),
        *("uri-template", "json-pointer", "relative-json-pointer", "regex"),
    )
)
"""Formats of the standard that nothing here can enforce. Others are annotations: no constraint."""


def parse_schema(text: str) -> Any:
    """Its JSON. Raises `GrammarError` with the position."""
    try:
        schema = json.loads(text, parse_constant=_constant, parse_float=_float, parse_int=_integer)
    except json.JSONDecodeError as error:
        where = f"character {error.pos}"
        raise GrammarError(f"the schema is not JSON: {error.msg}", where=where) from None
    except ValueError as error:  # a number that is too long or that JSON does not have
        raise GrammarError(f"the schema is not JSON: {error}") from None
    except RecursionError:
        raise GrammarError("the schema is nested too deep") from None
    _check_depth(schema)
    if _HALF.search(text):
        try:
            json.dumps(schema, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise GrammarError("the schema holds half of a surrogate pair") from None
    if not isinstance(schema, (dict, bool)):
        raise GrammarError("a schema is an object or a boolean", where="#")
    return schema


def check_document(document: Document) -> None:
    """Shapes of all keywords, references, loops. Raises `GrammarError`."""
    if document.root.schema is False:
        raise GrammarError("no value can match the schema: it is false", where="#")
    for node in list(document.nodes.values()):
        _check_shapes(node)
    reachable = document.reachable()
    for node in reachable:
        _check_shapes(node)  # a reference may lead to a place that is no subschema otherwise
        _check_patterns(node)
    _check_loops(document, reachable)


def check_supported(document: Document, paths: Mapping[int, str]) -> None:
    """Raises `GrammarError` naming a keyword that nothing enforces, the outermost first. ``paths``:
    where the schema as it was given has a subschema, by identity."""
    found: list[tuple[int, str, int, str, str]] = []
    for node in document.reachable():
        if not isinstance(node.schema, dict):
            continue
        path = paths.get(node.key, node.path)
        at = path.count("/"), path
        for i, keyword in enumerate(node.schema):
            if keyword in UNSUPPORTED:
                found.append((*at, i, keyword, f"the keyword {keyword!r} is not supported"))
        if _counts_names(node.schema):
            message = "minProperties of names that are not declared is not supported beyond 1"
            found.append((*at, 0, "minProperties", message))
        name = node.schema.get("format")
        if name in UNSUPPORTED_FORMATS and may_be(node.schema, "string"):
            found.append((*at, 0, "format", f"the format {name!r} is not supported"))
    if found:
        _, path, _, keyword, message = min(found)
        raise GrammarError(message, where=pointer(path, keyword))


def _counts_names(schema: dict[str, Any]) -> bool:
    """Nothing keeps two members of an open object from having the same name: they count as one."""
    declared = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    return not declared and schema.get("minProperties", 0) > len(schema.get("required", ())) + 1


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _float(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError("a number is beyond the range of floats")
    return number


def _integer(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f"a number has {len(digits)} digits; {_DIGITS} are the most")
    return int(digits)


def _check_depth(value: Any) -> None:
    level = [value]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise GrammarError(f"the schema is nested over {MAX_DEPTH} levels deep")
        deeper: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                deeper += item.values()
            elif isinstance(item, list):
                deeper += item
        level = [item for item in deeper if isinstance(item, (dict, list))]


# --- shapes ---------------------------------------------------------------------------------------


def _is_count(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and value >= 0 and value == int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_types(value: Any) -> bool:
    return bool(value) and all(name in TYPES for name in value)


def _is_type(value: Any) -> bool:
    return value in TYPES if isinstance(value, str) else isinstance(value, list)


_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        ("an integer of at least 0", _is_count),
    ),
    **dict.fromkeys(("minContains", "maxContains"), ("an integer of at least 0", _is_count)),
    **dict.fromkeys(("minimum", "maximum"), ("a number", _is_number)),
    **dict.fromkeys(
        ("exclusiveMinimum", "exclusiveMaximum"),
        ("a number", lambda value: isinstance(value, bool) or _is_number(value)),
    ),
    "multipleOf": ("a number above 0", lambda value: _is_number(value) and value > 0),
    "uniqueItems": ("a boolean", lambda value: isinstance(value, bool)),
    "required": ("a list of strings", _is_names),
    "enum": ("a list", lambda value: isinstance(value, list)),
    **dict.fromkeys(
        ("pattern", "format", "$ref", "$id", "$anchor", "$dynamicRef", "$dynamicAnchor"),
        ("a string", lambda value: isinstance(value, str)),
    ),
    "dependentRequired": (
        "an object of lists of strings",
        lambda value: isinstance(value, dict) and all(map(_is_names, value.values())),
    ),
}


def _check_shapes(node: Node) -> None:
    if not isinstance(node.schema, dict):
        return
    for keyword, value in node.schema.items():
        where = pointer(node.path, keyword)
        if keyword == "type":
            _check_type(value, where)
        elif keyword in _RULES:
            what, holds = _RULES[keyword]
            if not holds(value):
                raise GrammarError(f"{keyword!r} must be {what}", where=where)
        elif keyword in MAPS:
            _check_map(keyword, value, where)
        elif isinstance(value, list) and keyword in LISTS:
            for i, item in enumerate(value):
                if not isinstance(item, (dict, bool)):
                    raise GrammarError(
                        "a schema is an object or a boolean", where=pointer(where, i)
                    )
            if not value and keyword not in ("items", "prefixItems"):
                raise GrammarError(f"{keyword!r} must not be empty", where=where)
        elif keyword in LISTS - ONE:
            raise GrammarError(f"{keyword!r} must be a list of schemas", where=where)
        elif keyword in ONE and not isinstance(value, (dict, bool)):
            raise GrammarError(f"{keyword!r} must be a schema", where=where)


def _check_patterns(node: Node) -> None:
    if not isinstance(node.schema, dict):
        return
    if "pattern" in node.schema and may_be(node.schema, "string"):
        check_pattern(node.schema["pattern"], pointer(node.path, "pattern"))
    for pattern in node.schema.get("patternProperties", ()):
        check_pattern(pattern, pointer(node.path, "patternProperties", pattern))


def _check_type(value: Any, where: str) -> None:
    if not _is_type(value):
        known = ", ".join(TYPES)
        said = f" {value[:40]!r}" if isinstance(value, str) else ""
        raise GrammarError(f"unknown type{said}; known are {known}", where=where)
    if isinstance(value, list) and not _is_types(value):
        raise GrammarError(
            f"'type' must list at least one of {', '.join(TYPES)}, and nothing else", where=where
        )


def _check_map(keyword: str, value: Any, where: str) -> None:
    if not isinstance(value, dict):
        raise GrammarError(f"{keyword!r} must be an object", where=where)
    for name, item in value.items():
        names = keyword == "dependencies" and _is_names(item)
        if not names and not isinstance(item, (dict, bool)):
            raise GrammarError("a schema is an object or a boolean", where=pointer(where, name))


def may_be(schema: dict[str, Any], kind: str) -> bool:
    """Whether its own ``type`` lets a value be of a kind."""
    types = schema.get("type", TYPES)
    return kind in ([types] if isinstance(types, str) else types)


# --- loops ----------------------------------------------------------------------------------------


def _check_loops(document: Document, nodes: list[Node]) -> None:
    """A schema that stands for itself, with nothing in between, says nothing and ends nowhere."""
    state: dict[int, bool] = {}  # False while being visited
    for start in nodes:
        stack: list[tuple[Node, bool]] = [(start, False)]
        while stack:
            node, left = stack.pop()
            if left:
                state[node.key] = True
                continue
            if node.key in state:
                if not state[node.key]:
                    raise GrammarError("the schema refers to itself without end", where=node.path)
                continue
            if not isinstance(node.schema, dict):
                continue
            state[node.key] = False
            stack.append((node, True))
            same = [child for keyword, child in children(node) if keyword in IN_PLACE]
            target = document.target(node)
            stack += [(child, False) for child in [*same, *([target] if target else [])]]
