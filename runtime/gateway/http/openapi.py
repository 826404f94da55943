"""The server's own description of its endpoints, made from the types that it reads bodies into."""

from __future__ import annotations

import re
from typing import Any

import msgspec

ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "code": {"type": "integer"},
            },
        }
    },
}
"""What every answer that is not a success holds; ``code`` is its status."""

_FAILED = {"description": "What went wrong.", "content": {"application/json": {"schema": ERROR}}}


def described(path: str, form: type[msgspec.Struct] | None) -> dict[str, Any]:
    """What the description of ``path`` says beside its name: parameters, body, answers."""
    answers: dict[str, Any] = {"default": _FAILED}
    found: dict[str, Any] = {"responses": answers}
    names = re.findall(r"\{(\w+)(?::\w+)?\}", path)
    if names:
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if form is None:
        return found
    schema, components = msgspec.json.schema_components([form], ref_template="{name}")
    body = {"schema": _inlined(schema[0], components)}
    found["requestBody"] = {"required": True, "content": {"application/json": body}}
    if "stream" in form.__struct_fields__:
        answers["200"] = {"content": {"text/event-stream": {"schema": {"type": "string"}}}}
    return found


def _inlined(schema: Any, components: dict[str, Any], within: frozenset[str] = frozenset()) -> Any:
    """A schema with the parts that it refers to put in their places. ``within``: what this is a
    part of; instructions hold instructions, and such a part is left open."""
    if isinstance(schema, list):
        return [_inlined(item, components, within) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        name = schema["$ref"]
        if name in within:
            return {"type": "object", "title": name}
        return _inlined(components[name], components, within | {name})
    return {name: _inlined(value, components, within) for name, value in schema.items()}
