"""A checked JSON schema in the keywords that backends enforce; it means the same."""

from __future__ import annotations

import itertools
import json
from functools import lru_cache
from typing import Any

from ..protocol.errors import GrammarError
from .checks_schema import (
    FORMATS,
    UNSUPPORTED_FORMATS,
    check_document,
    check_supported,
    may_be,
    parse_schema,
)
from .schema_document import Document, Node, Schema, pointer
from .schema_exclusion import exclude, integers_only, names_of, same
from .schema_formats import PATTERNS
from .schema_names import lower_names
from .schema_negation import Known, negate
from .schema_numbers import lower_numbers
from .schema_patterns import lower_decimals, lower_patterns
from .schema_values import barren

_MOST_CHARACTERS = 4_000_000
_MOST_DEPENDENCIES = 6
_MOST_ALTERNATIVES = 12
_MOST_EXACTLY = 4
_SHORT = frozenset(("required", "not", "title", "description"))


@lru_cache(maxsize=16)
def lower_schema(text: str) -> str:
    """Check a schema and lower it. Raises `GrammarError` that names keyword and path."""
    schema = parse_schema(text)
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    lower_decimals(list(Document(schema).nodes.values()))
    document = Document(schema)
    check_document(document)
    for node in document.reachable():
        if isinstance(node.schema, dict):
            _lower(document, node, node.schema)
    paths = {key: node.path for key, node in document.nodes.items()}
    document = Document(schema)
    check_supported(document, paths)
    lower_numbers(document.reachable(), paths)
    dead = barren(document)
    if document.root.key in dead:
        raise GrammarError("no finite value can match the schema", where="#")
    for node in dead.values():
        if isinstance(node.schema, dict):
            _also(node.schema, False)
    for node in document.reachable():
        lower_patterns(node, paths.get(node.key, node.path))
    if _size(schema) > _MOST_CHARACTERS:
        raise GrammarError("the schema is too complex: its alternatives are too many")
    return json.dumps(schema, ensure_ascii=False)


def open_names(text: str) -> bool:
    """Whether objects of a lowered schema may have other members beside ones it declares: then an
    escaped spelling of a declared name would pass for another."""
    for node in Document(json.loads(text)).reachable():
        schema = node.schema
        if not isinstance(schema, dict) or schema.get("additionalProperties") is False:
            continue
        if schema.get("properties") or schema.get("patternProperties"):
            return True
    return False


def _lower(document: Document, node: Node, schema: dict[str, Any]) -> None:
    schema.pop("x-guidance", None)  # a spec does not choose how strictly it is read
    name = schema.get("format")
    if name is not None and (
        name not in FORMATS | UNSUPPORTED_FORMATS or not may_be(schema, "string")
    ):
        del schema["format"]
    elif name in PATTERNS:
        _also(schema, {"pattern": PATTERNS[name]})
    if "uniqueItems" in schema and (
        schema["uniqueItems"] is False
        or schema.get("maxItems", 2) <= 1
        or not may_be(schema, "array")
    ):
        del schema["uniqueItems"]
    _lower_dependencies(schema)
    _lower_not(document, node, schema)
    _lower_if(document, node, schema)
    _lower_one_of(document, node, schema)
    lower_names(document, node, schema)


def _size(value: Any) -> int:
    """About how many characters it is as JSON, however often a part is in it."""
    sizes: dict[int, int] = {}

    def size(part: Any) -> int:
        if not isinstance(part, (dict, list)):
            return len(part) + 2 if isinstance(part, str) else 8
        if id(part) not in sizes:
            inner = part.values() if isinstance(part, dict) else part
            names = sum(len(name) + 4 for name in part) if isinstance(part, dict) else len(part)
            sizes[id(part)] = 2 + names + sum(map(size, inner))
        return sizes[id(part)]

    return size(value)


def _also(schema: dict[str, Any], other: Schema) -> None:
    schema["allOf"] = [*schema.get("allOf", ()), other]


def _lower_dependencies(schema: dict[str, Any]) -> None:
    """If there is a member, then…: either it is not there, or that holds."""
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        if not may_be(schema, "object"):
            schema.pop(keyword, None)
        if not 0 <= len(schema.get(keyword, ())) <= _MOST_DEPENDENCIES:
            continue
        for name, needs in schema.pop(keyword, {}).items():
            then: Schema = {"required": needs} if isinstance(needs, list) else needs
            if name in schema.get("required", ()):
                _also(schema, then)
            elif then is not True and then != {"required": []}:
                _also(schema, {"anyOf": [{"properties": {name: False}}, then]})


def _lower_not(document: Document, node: Node, schema: dict[str, Any]) -> None:
    if "not" not in schema:
        return
    inner = schema["not"]
    if isinstance(inner, dict) and isinstance(schema.get("enum"), list):
        refused = inner.get("enum", [inner["const"]] if "const" in inner else None)
        if refused is not None and len(inner) == 1:
            del schema["not"]
            schema["enum"] = [
                value for value in schema["enum"] if not any(same(value, no) for no in refused)
            ]
            return
    opposite = negate(document, Node(pointer(node.path, "not"), inner, node.base))
    if opposite is not None:
        del schema["not"]
        if opposite is not True:
            _also(schema, opposite)


def _lower_if(document: Document, node: Node, schema: dict[str, Any]) -> None:
    if "if" not in schema:
        schema.pop("then", None)
        schema.pop("else", None)
        return
    condition = schema["if"]
    yes, no = schema.get("then", True), schema.get("else", True)
    if yes is True and no is True:
        del schema["if"]
        return
    opposite = negate(document, Node(pointer(node.path, "if"), condition, node.base))
    if opposite is None:
        return
    for keyword in ("if", "then", "else"):
        schema.pop(keyword, None)
    _also(schema, {"anyOf": [{"allOf": [condition, yes]}, {"allOf": [opposite, no]}]})


def _lower_one_of(document: Document, node: Node, schema: dict[str, Any]) -> None:
    """Any of those that exclude each other; else one and none of the others, where the others'
    opposites are short."""
    options = schema.get("oneOf")
    if not options or len(options) > _MOST_ALTERNATIVES:
        return
    nodes = [
        Node(pointer(node.path, "oneOf", i), option, node.base) for i, option in enumerate(options)
    ]
    if all(exclude(document, a, b) for a, b in itertools.combinations(nodes, 2)):
        del schema["oneOf"]
        _also(schema, {"anyOf": options})
        return
    if len(options) > _MOST_EXACTLY and not all(
        isinstance(option, dict) and set(option) <= _SHORT for option in options
    ):
        return
    exactly: list[Schema] = []
    for one in nodes:
        known = Known(integers_only(document, one), names_of(document, one))
        none_of = [negate(document, other, known=known) for other in nodes if other is not one]
        if any(opposite is None for opposite in none_of):
            return
        exactly.append({"allOf": [one.schema, *none_of]})
    del schema["oneOf"]
    _also(schema, {"anyOf": exactly})
