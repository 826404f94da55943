"""Python types as JSON schemas.

Taken are the scalars, dates, times, ids and decimals, ``None``, ``Any``, lists, tuples, sets, dicts
with text keys, unions, ``Literal``, enums, dataclasses, TypedDicts, bounds of ``Annotated`` and,
without importing pydantic, its models. Objects made from types are closed: nothing is written that
no field would hold.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import types
import typing
from collections.abc import Callable
from typing import Any, Union, cast, get_args, get_origin

from ..protocol.errors import BadInputError
from .annotated import narrowed
from .json_scalars import scalar_schema
from .pydantic_schema import model_schema

Schema = dict[str, Any]

_SCALARS: dict[Any, Schema] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    type(None): {"type": "null"},
    None: {"type": "null"},
    Any: {},
    object: {},
}
ARRAYS: dict[Any, Callable[[list[Any]], Any]] = {
    list: list,
    set: set,
    frozenset: frozenset,
    collections.abc.Sequence: list,
    collections.abc.Iterable: list,
    collections.abc.Set: set,
}
MAPS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
PRESENCE = (typing.Required, typing.NotRequired)


def json_schema_of(type_: Any) -> Schema:
    """The schema of a type. Raises `BadInputError` naming a type that has none, and its field."""
    writer = _Writer()
    schema = writer.schema(type_, name_of(type_), top=True)
    if not writer.definitions:
        return schema
    return {**schema, "$defs": writer.definitions}


def is_typed_dict(type_: Any) -> bool:
    """Whether a type is a TypedDict."""
    return isinstance(type_, type) and hasattr(type_, "__required_keys__")


def enum_values(type_: type[enum.Enum]) -> dict[Any, enum.Enum]:
    """What stands for each member: its value where all are text or numbers, else its name."""
    members = list(type_)
    if not members:
        raise BadInputError(f"{type_.__name__} has no members")
    if all(isinstance(m.value, (str, int, float)) for m in members):
        return {m.value: m for m in members}
    return {m.name: m for m in members}


class _Writer:
    """``definitions``: schemas of classes that others refer to, by name."""

    def __init__(self) -> None:
        self.definitions: Schema = {}
        self._names: dict[Any, str] = {}

    def schema(self, type_: Any, where: str, top: bool = False) -> Schema:
        scalar = _SCALARS.get(type_) if _hashable(type_) else None
        if scalar is not None:
            return dict(scalar)
        if hasattr(type_, "__supertype__"):  # NewType
            return self.schema(type_.__supertype__, where)
        if isinstance(type_, type) and get_origin(type_) is None:
            return self._class(type_, where, top)
        return self._generic(type_, where)

    def _generic(self, type_: Any, where: str) -> Schema:
        origin, arguments = get_origin(type_), get_args(type_)
        if origin is typing.Annotated:
            return narrowed(self.schema(arguments[0], where), arguments[1:])
        if origin in PRESENCE:
            return self.schema(arguments[0], where)
        if origin is typing.Literal:
            return _one_of(list(arguments), where)
        if origin in (Union, types.UnionType):
            return {"anyOf": [self.schema(a, where) for a in arguments]}
        if origin is tuple and len(arguments) == 2 and arguments[1] is ...:
            return {"type": "array", "items": self.schema(arguments[0], where)}
        if origin is tuple:
            items = [self.schema(a, f"{where}[{i}]") for i, a in enumerate(arguments)]
            size = len(items)
            return {"type": "array", "prefixItems": items, "minItems": size, "maxItems": size}
        if origin in ARRAYS:
            return {"type": "array", "items": self.schema(arguments[0], f"{where}[]")}
        if origin in MAPS:
            if arguments[0] is not str:
                raise BadInputError(f"{where}: keys of JSON objects are str, not {arguments[0]!r}")
            values = self.schema(arguments[1], f"{where}[*]")
            return {"type": "object", "additionalProperties": values}
        raise BadInputError(f"{where}: {type_!r} has no JSON schema")

    def _class(self, type_: type, where: str, top: bool) -> Schema:
        if type_ in ARRAYS or type_ is tuple:
            return {"type": "array"}
        if type_ in MAPS:
            return {"type": "object"}
        scalar = scalar_schema(type_)
        if scalar is not None:
            return scalar
        if issubclass(type_, enum.Enum):
            return _one_of(list(enum_values(type_)), where)
        if callable(getattr(type_, "model_json_schema", None)):
            return self._model(cast("Any", type_), top)
        if not (dataclasses.is_dataclass(type_) or is_typed_dict(type_)):
            raise BadInputError(f"{where}: {type_.__name__} has no JSON schema")
        return self._named(type_, lambda: self._object(type_))

    def _named(self, type_: type, make: Callable[[], Schema]) -> Schema:
        """A reference to the class's definition, which is made at its first use."""
        if type_ not in self._names:
            name = type_.__name__
            if name in self.definitions:
                raise BadInputError(f"two different types are called {name}")
            self._names[type_] = name
            self.definitions[name] = {}
            self.definitions[name] = make()
        return {"$ref": f"#/$defs/{self._names[type_]}"}

    def _object(self, type_: type) -> Schema:
        fields = fields_of(type_)
        return {
            "type": "object",
            "properties": {
                name: self.schema(hint, f"{type_.__name__}.{name}")
                for name, (hint, _) in fields.items()
            },
            "required": [name for name, (_, required) in fields.items() if required],
            "additionalProperties": False,
        }

    def _model(self, type_: Any, top: bool) -> Schema:
        """pydantic's own schema; its definitions join ours."""
        whole = _closed(model_schema(type_))
        if top:
            return whole
        for name, definition in whole.pop("$defs", {}).items():
            if self.definitions.setdefault(name, definition) != definition:
                raise BadInputError(f"two different types are called {name}")
        return self._named(type_, lambda: whole) if "$ref" not in whole else whole


def fields_of(type_: type) -> dict[str, tuple[Any, bool]]:
    """(type, required) of each field."""
    try:
        hints = typing.get_type_hints(type_, include_extras=True)
    except NameError as error:
        raise BadInputError(f"{type_.__name__}: {error}") from None
    if is_typed_dict(type_):
        required = cast("frozenset[str]", getattr(type_, "__required_keys__"))  # noqa: B009
        # Annotations that are text hide their NotRequired from the class itself.
        said = {typing.Required: True, typing.NotRequired: False}
        return {
            name: (hint, said.get(get_origin(hint), name in required))
            for name, hint in hints.items()
        }
    nothing = dataclasses.MISSING
    return {
        f.name: (hints[f.name], f.default is nothing and f.default_factory is nothing)
        for f in dataclasses.fields(cast("Any", type_))
        if f.init
    }


def _one_of(values: list[Any], where: str) -> Schema:
    plain = [v.value if isinstance(v, enum.Enum) else v for v in values]
    for value in plain:
        if not isinstance(value, (str, int, float, bool, type(None))):
            raise BadInputError(f"{where}: {value!r} is no JSON value")
    return {"enum": plain}


def _closed(schema: Any) -> Any:
    """The schema with its objects of known properties closed, unless they say otherwise."""
    if isinstance(schema, list):
        return [_closed(item) for item in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    given = cast("Schema", schema)
    kept: Schema = {}
    for key, value in given.items():
        if key in ("properties", "patternProperties", "$defs"):  # their keys are names
            kept[key] = {name: _closed(inner) for name, inner in value.items()}
        else:
            data = key in ("default", "const", "enum", "examples")
            kept[key] = value if data else _closed(value)
    # Of sets: no mask can count what was said, and reading JSON as a set drops what is twice there.
    kept.pop("uniqueItems", None)
    if isinstance(kept.get("properties"), dict) and kept.get("type") == "object":
        kept.setdefault("additionalProperties", False)
    return kept


def name_of(type_: Any) -> str:
    return getattr(type_, "__name__", str(type_))


def _hashable(value: Any) -> bool:
    return isinstance(value, collections.abc.Hashable)
