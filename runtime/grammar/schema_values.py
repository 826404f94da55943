"""Which subschemas have no finite value: required members or items that never end."""

from __future__ import annotations

from typing import Any

from ..protocol.errors import GrammarError
from .schema_document import Document, Node, children

MAX_WORK = 1_000_000


def barren(document: Document) -> dict[int, Node]:
    """The reachable subschemas, by identity, that no finite value matches as far as their nesting
    shows (bounds and patterns are not looked at)."""
    nodes = {node.key: node for node in document.reachable()}
    users: dict[int, list[int]] = {}
    for key, node in nodes.items():
        target = document.target(node)
        for part in [child for _, child in children(node)] + ([target] if target else []):
            users.setdefault(part.key, []).append(key)
    fertile: set[int] = set()
    todo = list(nodes)  # taken from the end: what is deep inside comes first
    work = 0
    while todo:
        key = todo.pop()
        if key in fertile or key not in nodes:
            continue
        schema = nodes[key].schema
        work += len(schema) + 1 if isinstance(schema, dict) else 1
        if work > MAX_WORK:
            raise GrammarError("the schema is too complex: its references are too tangled")
        if _fertile(document, nodes[key], fertile):
            fertile.add(key)
            todo += users.get(key, ())
    return {key: node for key, node in nodes.items() if key not in fertile}


def _fertile(document: Document, node: Node, fertile: set[int]) -> bool:
    schema = node.schema
    if isinstance(schema, bool):
        return schema

    def ok(item: Any) -> bool:
        return Node("", item, "").key in fertile or item is True

    target = document.target(node)
    if target is not None and not ok(target.schema):
        return False
    if not all(ok(item) for item in schema.get("allOf", ())):
        return False
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema and not any(ok(item) for item in schema[keyword]):
            return False
    if "const" in schema or "enum" in schema:
        return schema.get("enum") != []
    types = schema.get("type")
    kinds = [types] if isinstance(types, str) else types
    if not kinds:
        return True
    return any(
        _object(schema, ok) if kind == "object" else _array(schema, ok) if kind == "array" else True
        for kind in kinds
    )


def _object(schema: dict[str, Any], ok: Any) -> bool:
    return all(
        ok(schema.get("properties", {}).get(name, _of_other(schema)))
        for name in schema.get("required", ())
    )


def _of_other(schema: dict[str, Any]) -> Any:
    """What a member that is not declared must match, roughly: patterns only in favour, as to match
    them here might take for ever."""
    return bool(schema.get("patternProperties")) or schema.get("additionalProperties", True)


def _array(schema: dict[str, Any], ok: Any) -> bool:
    least = int(schema.get("minItems", 0))
    items = schema.get("items", True)
    first = schema.get("prefixItems", ())
    if isinstance(items, list):
        first, items = items, schema.get("additionalItems", True)
    return all(ok(item) for item in first[:least]) and (least <= len(first) or ok(items))
