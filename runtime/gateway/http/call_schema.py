"""What a call of a tool must match: its name, and arguments as the tool's own schema has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .errors import bad, cut

_NO_OBJECTS = ("array", "boolean", "integer", "null", "number", "string")
_VALUES = frozenset(("const", "enum", "default", "examples"))
_MAPS = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
)
"""Keywords whose keys are names."""
_OPENING = (
    *("additionalProperties", "patternProperties", "unevaluatedProperties"),
    *("anyOf", "oneOf", "$ref"),
)
_COMBINING = frozenset(("allOf", "not", "if", "dependentSchemas", "$dynamicRef"))
_OTHERS = frozenset(("anyOf", "oneOf", "$ref"))
_BESIDE = ("properties", "patternProperties", "additionalProperties", "required")


def call_schema(function: Mapping[str, Any], key: str, start: str) -> dict[str, Any]:
    """The schema of a call. ``start`` points to where its ``properties`` will be, ``key`` is the
    member that holds the arguments. Raises `HttpError` for arguments that are no object."""
    given = function.get("parameters") or {"type": "object", "properties": {}}
    parameters = {name: value for name, value in given.items() if name not in ("$schema", "$id")}
    parameters["type"] = _only_object(parameters.get("type"), function["name"])
    if not any(_combines(part) for _, part in _parts(parameters)):
        parameters = _rebuilt(parameters, _closed)
    own = given.get("$id")
    moved = _moved(parameters, f"{start}/{key}", own if isinstance(own, str) else "")
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, key: moved},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _only_object(types: Any, name: str) -> Any:
    """Arguments are an object, also where a schema takes other values or says nothing."""
    if types is None or types == "object" or (isinstance(types, list) and "object" in types):
        return "object"
    if isinstance(types, str) and types in _NO_OBJECTS:
        raise bad(
            f"tools: the arguments of {cut(name, 80)} must be an object, not {types}", "tools"
        )
    return types  # which is wrong, and named by who checks schemas


def _parts(schema: Any, path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(pointer, schema) of all that it consists of, but for what has an ``$id`` of its own."""
    if isinstance(schema, list):
        for i, item in enumerate(schema):
            yield from _parts(item, f"{path}/{i}")
    if not isinstance(schema, Mapping) or (path and _is_another(schema)):
        return
    yield path, schema
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, Mapping):
            for name, item in value.items():
                yield from _parts(item, f"{path}/{key}/{_step(name)}")
        elif key not in _VALUES:
            yield from _parts(value, f"{path}/{_step(key)}")


def _rebuilt(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """The schema with all its `_parts` changed, the innermost first."""
    if isinstance(schema, list):
        return [_rebuilt(item, change) for item in schema]
    if not isinstance(schema, Mapping) or _is_another(schema):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, Mapping):
            found[key] = {name: _rebuilt(item, change) for name, item in value.items()}
        else:
            found[key] = value if key in _VALUES else _rebuilt(value, change)
    return change(found)


def _is_another(schema: Mapping[str, Any]) -> bool:
    """Whether its references are relative to itself, wherever it stands."""
    own = schema.get("$id")
    return isinstance(own, str) and not own.startswith("#")


def _step(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1").replace("%", "%25")


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without properties that it does not name, where it does not say that there may be
    others. What matches it matches the original too; small models make up arguments without end."""
    properties = schema.get("properties")
    if schema.get("type") != "object" or not isinstance(properties, Mapping):
        return schema
    if any(name in schema for name in _OPENING):
        return schema
    required = schema.get("required")
    names = required if isinstance(required, list) else []
    asked = {name: True for name in names if isinstance(name, str) and name not in properties}
    return {**schema, "properties": {**properties, **asked}, "additionalProperties": False}


def _combines(schema: Mapping[str, Any]) -> bool:
    """Whether parts of it hold for the same object, so that none can be closed by itself."""
    if any(name in schema for name in _BESIDE):
        return any(name in _COMBINING or name in _OTHERS for name in schema)
    return any(name in _COMBINING for name in schema)


def _moved(schema: Mapping[str, Any], start: str, own: str) -> Any:
    """The schema with its local references, also by the URI ``own``, right for its new place in a
    larger one, where others may have anchors of the same names."""
    anchors = {
        part["$anchor"]: path
        for path, part in _parts(schema)
        if isinstance(part.get("$anchor"), str)
    }

    def change(part: dict[str, Any]) -> dict[str, Any]:
        part.pop("$anchor", None)
        reference = part.get("$ref")
        if isinstance(reference, str):
            if own and reference.partition("#")[0] == own.rstrip("#"):
                reference = "#" + reference.partition("#")[2]
            if reference[:2] in ("#", "#/"):
                part["$ref"] = f"#{start}{reference[1:]}"
            elif reference[:1] == "#" and reference[1:] in anchors:
                part["$ref"] = f"#{start}{anchors[reference[1:]]}"
        return part

    return _rebuilt(schema, change)
