"""``propertyNames`` in keywords that backends enforce."""

from __future__ import annotations

from typing import Any

from .checks_schema import may_be
from .schema_document import Document, Node, pointer
from .schema_formats import LEAP
from .schema_negation import ANNOTATIONS

_HEX = "[0-9a-fA-F]"
_DAYS = (
    "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8])"
)
_FORMATS = {
    "uuid": f"^{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}$",
    "date": f"^(?:[0-9]{{4}}-(?:{_DAYS})|{LEAP}-02-29)$",
}
"""Those that keys of maps have."""


def lower_names(document: Document, node: Node, schema: dict[str, Any]) -> None:
    """Say which names there may be by ``properties`` and ``patternProperties``, where that can be
    said; change the schema in place."""
    names = schema.get("propertyNames")
    if names is None:
        return
    if names is True or not may_be(schema, "object"):
        del schema["propertyNames"]
        return
    if schema.get("patternProperties") or not isinstance(names, dict):
        return
    found = _constraints(document, Node(pointer(node.path, "propertyNames"), names, node.base))
    rest = schema.get("additionalProperties", True)
    declared = schema.get("properties", {})
    if found is None:
        return
    if list(found) == ["enum"]:
        allowed = [name for name in found["enum"] if isinstance(name, str)]
        kept = {name: item if name in allowed else False for name, item in declared.items()}
        schema["properties"] = kept | {name: rest for name in allowed if name not in declared}
    elif found and declared:
        return
    elif (pattern := _pattern(found)) is not None:
        schema["patternProperties"] = {pattern: rest}
    elif found:
        return
    if found:
        schema["additionalProperties"] = False
    del schema["propertyNames"]


def _constraints(document: Document, node: Node) -> dict[str, Any] | None:
    """What the schema of a name asks for, behind references, annotations left out and ``const`` as
    ``enum``; None for one that no name matches, or that says a thing twice."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    here: Node | None = node
    while here is not None and here.key not in seen:
        seen.add(here.key)
        if isinstance(here.schema, bool):
            return found if here.schema else None
        for keyword, value in here.schema.items():
            if keyword == "$ref" or keyword in ANNOTATIONS:
                continue
            if keyword == "type" and may_be(here.schema, "string"):
                continue
            said, value = ("enum", [value]) if keyword == "const" else (keyword, value)
            if said in found:
                return None
            found[said] = value
        here = document.target(here)
    return found


def _pattern(found: dict[str, Any]) -> str | None:
    """All that is asked for in one pattern, if one can say it."""
    if list(found) == ["pattern"]:
        return found["pattern"]
    if list(found) == ["format"]:
        return _FORMATS.get(found["format"])
    if found and set(found) <= {"minLength", "maxLength"}:
        most = found.get("maxLength", "")
        return f"^[\\s\\S]{{{int(found.get('minLength', 0))},{most and int(most)}}}$"
    return None
