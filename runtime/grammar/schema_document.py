"""A JSON schema as a graph: every subschema with its place, and what each reference leads to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from ..protocol.errors import GrammarError

Schema = dict[str, Any] | bool

ONE = frozenset(
    (
        *("additionalItems", "additionalProperties", "contains", "contentSchema", "items", "not"),
        *("if", "then", "else", "propertyNames", "unevaluatedItems", "unevaluatedProperties"),
    )
)
"""Keywords that hold a schema (``items`` of older drafts also a list)."""
LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
MAPS = frozenset(
    (
        *("properties", "patternProperties", "dependentSchemas", "dependencies"),
        *("$defs", "definitions"),
    )
)
SHELVES = frozenset(("$defs", "definitions"))
"""What only references lead to."""
MAX_SUBSCHEMAS = 30_000
MAX_WORK = 50_000
"""Steps of `Document.afford`: under a second."""
IN_PLACE = ("allOf", "anyOf", "oneOf")


@dataclass(frozen=True)
class Node:
    """One subschema. ``path`` is a JSON pointer, ``base`` the URI its references are relative to.
    ``key`` is the identity of the schema's own object."""

    path: str
    schema: Schema
    base: str

    @property
    def key(self) -> int:
        return id(self.schema) if isinstance(self.schema, dict) else -int(self.schema) - 1


def pointer(path: str, *steps: object) -> str:
    """A longer JSON pointer. Each step is cut to 60 characters: it goes into messages."""
    for step in steps:
        text = str(step)
        text = text if len(text) <= 60 else text[:59] + "…"
        path += "/" + text.replace("~", "~0").replace("/", "~1")
    return path


def children(node: Node) -> Iterator[tuple[str, Node]]:
    """(keyword, subschema) of all that is directly within, in the order of the schema."""
    schema = node.schema
    if not isinstance(schema, dict):
        return
    base = _base(node)
    for keyword, value in schema.items():
        path = f"{node.path}/{keyword}"
        if keyword in ONE and _is_schema(value):
            yield keyword, Node(path, value, base)
        elif keyword in LISTS and isinstance(value, list):
            for i, item in enumerate(value):
                if _is_schema(item):
                    yield keyword, Node(pointer(path, i), item, base)
        elif keyword in MAPS and isinstance(value, dict):
            for name, item in value.items():
                if _is_schema(item):
                    yield keyword, Node(pointer(path, name), item, base)


class Document:
    """All of a schema; ``nodes`` holds every subschema by its identity, also unused ones."""

    def __init__(self, schema: Schema) -> None:
        self.root = Node("#", schema, "")
        self.nodes: dict[int, Node] = {}
        self._targets: dict[int, Node | None] = {}
        self._work = 0
        self._places: dict[str, Node] = {"": self.root}
        self._walk(self.root)

    def _walk(self, start: Node) -> None:
        stack = [start]
        while stack:
            node = stack.pop()
            if node.key in self.nodes or not isinstance(node.schema, dict):
                continue
            self.nodes[node.key] = node
            if len(self.nodes) > MAX_SUBSCHEMAS:
                raise GrammarError(f"the schema has over {MAX_SUBSCHEMAS} subschemas")
            base = _base(node)
            if isinstance(node.schema.get("$id"), str):
                self._places.setdefault(base, node)
            for keyword in ("$anchor", "$dynamicAnchor"):
                if isinstance(name := node.schema.get(keyword), str):
                    self._places.setdefault(f"{base}#{name}", node)
            stack += [child for _, child in children(node)]

    def afford(self, work: int = 1) -> bool:
        """Whether so much more may be done on what is only worth a try; counts it."""
        self._work += work
        return self._work <= MAX_WORK

    def target(self, node: Node) -> Node | None:
        """What a node's ``$ref`` leads to; None if it has none. Raises `GrammarError`."""
        if not isinstance(node.schema, dict) or "$ref" not in node.schema:
            return None
        if node.key not in self._targets:
            self._targets[node.key] = self._find(node, node.schema)
        return self._targets[node.key]

    def _find(self, node: Node, schema: dict[str, Any]) -> Node | None:
        reference = schema["$ref"]
        if not isinstance(reference, str):
            return None
        where = pointer(node.path, "$ref")
        document, fragment = urldefrag(urljoin(_base(node), reference))
        if reference.startswith("#"):  # urljoin cannot with every kind of base
            document, fragment = _base(node), reference[1:]
        start = self._places.get(document)
        if start is None:
            raise GrammarError(f"{_short(reference)} is not in the schema itself", where=where)
        if fragment and not fragment.startswith("/"):
            found = self._places.get(f"{document}#{fragment}")
        else:
            found = _follow(start, unquote(fragment))
        if found is None:
            raise GrammarError(f"{_short(reference)} leads to nothing", where=where)
        self._walk(found)
        return found

    def reachable(self) -> list[Node]:
        """Subschemas that the root uses, each once. Raises `GrammarError` for a reference that
        leads nowhere."""
        seen: dict[int, Node] = {}
        stack = [self.root]
        while stack:
            node = stack.pop()
            if node.key in seen:
                continue
            seen[node.key] = node
            stack += [child for keyword, child in children(node) if keyword not in SHELVES]
            found = self.target(node)
            if found is not None:
                stack.append(found)
        return list(seen.values())


def _base(node: Node) -> str:
    own = node.schema.get("$id") if isinstance(node.schema, dict) else None
    if not isinstance(own, str) or own.startswith("#"):
        return node.base
    return urldefrag(urljoin(node.base, own))[0]


def _follow(start: Node, steps: str) -> Node | None:
    here: Any = start.schema
    path = start.path
    base = start.base
    for step in steps.split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(here, dict) and key in here:
            here = here[key]
        elif isinstance(here, list) and re.fullmatch(r"0|[1-9][0-9]{0,8}", key):
            if int(key) >= len(here):
                return None
            here = here[int(key)]
        else:
            return None
        path = pointer(path, key)
        if isinstance(here, dict) and here is not start.schema:
            base = _base(Node(path, here, base)) if "$id" in here else base
    return Node(path, here, base) if _is_schema(here) else None


def _is_schema(value: Any) -> bool:
    return isinstance(value, (dict, bool))


def _short(reference: str) -> str:
    return f"$ref {reference!r}" if len(reference) <= 80 else f"$ref {reference[:79]!r}…"
