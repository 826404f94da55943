"""JSON as values of Python types: the way back from `json_types`."""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from typing import Any, Union, cast, get_args, get_origin

from .json_scalars import scalar_from
from .json_types import ARRAYS, MAPS, PRESENCE, enum_values, fields_of, is_typed_dict, name_of


def value_from_json(type_: Any, text: str) -> Any:
    """The value of a type that JSON text stands for. Raises ValueError saying what does not fit."""
    validate = getattr(type_, "model_validate_json", None)
    if callable(validate):
        return validate(text)
    return value_from(type_, json.loads(text), name_of(type_))


def value_from(type_: Any, value: Any, where: str) -> Any:
    """A decoded JSON value as a value of a type. Raises ValueError saying what does not fit."""
    if hasattr(type_, "__supertype__"):
        return value_from(type_.__supertype__, value, where)
    origin, arguments = get_origin(type_), get_args(type_)
    if origin is typing.Annotated or origin in PRESENCE:
        return value_from(arguments[0], value, where)
    if origin is typing.Literal:
        return _member([(a, a) for a in arguments], value, where)
    if origin in (Union, types.UnionType):
        return _first_that_fits(arguments, value, where)
    if origin is tuple or type_ is tuple:
        return _tuple_from(arguments, value, where)
    kind = origin or type_
    if kind in ARRAYS:
        item = arguments[0] if arguments else Any
        return ARRAYS[kind](
            [value_from(item, v, f"{where}[{i}]") for i, v in enumerate(_array(value, where))]
        )
    if kind in MAPS:
        item = arguments[1] if arguments else Any
        return {k: value_from(item, v, f"{where}.{k}") for k, v in _map(value, where).items()}
    if isinstance(type_, type) and issubclass(type_, enum.Enum):
        return _member(list(enum_values(type_).items()), value, where)
    validate = getattr(type_, "model_validate", None)
    if callable(validate):
        return validate(value)
    if dataclasses.is_dataclass(type_) or is_typed_dict(type_):
        return _object_from(cast("type", type_), value, where)
    return _scalar_from(type_, value, where)


def _scalar_from(type_: Any, value: Any, where: str) -> Any:
    if type_ in (Any, object):
        return value
    found = scalar_from(type_, value, where)
    if found is not None:
        return found
    if type_ is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type_ is int and isinstance(value, float) and value.is_integer():
        return int(value)
    wanted = type(None) if type_ is None else type_
    if type(value) is not wanted:
        raise ValueError(f"{where}: {value!r} is no {getattr(type_, '__name__', type_)}")
    return value


def _tuple_from(arguments: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    items = _array(value, where)
    if not arguments or arguments[-1] is ...:
        arguments = (arguments[0] if arguments else Any,) * len(items)
    if len(arguments) != len(items):
        raise ValueError(f"{where}: {len(items)} items, not {len(arguments)}")
    return tuple(
        value_from(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(arguments, items))
    )


def _object_from(type_: type, value: Any, where: str) -> Any:
    fields = fields_of(type_)
    given = _map(value, where)
    missing = [name for name, (_, required) in fields.items() if required and name not in given]
    unknown = [name for name in given if name not in fields]
    if missing or unknown:
        what = f"no {missing[0]!r}" if missing else f"an unknown {unknown[0]!r}"
        raise ValueError(f"{where}: {what}")
    made = {k: value_from(fields[k][0], v, f"{where}.{k}") for k, v in given.items()}
    return type_(**made)


def _first_that_fits(arguments: tuple[Any, ...], value: Any, where: str) -> Any:
    # Of one and 1.0 the exact type is meant first.
    exact = [a for a in arguments if a is type(value)]
    problems: list[str] = []
    for argument in (*exact, *arguments):
        try:
            return value_from(argument, value, where)
        except ValueError as error:
            problems.append(str(error))
    raise ValueError(problems[-1])


def _member(members: list[tuple[Any, Any]], value: Any, where: str) -> Any:
    """As pairs, because True and 1 are one key of a dict."""
    for key, member in members:
        if type(key) is type(value) and key == value:
            return member
        if isinstance(key, enum.Enum) and key.value == value:
            return member
    raise ValueError(f"{where}: {value!r} is none of {', '.join(repr(key) for key, _ in members)}")


def _array(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{where}: {value!r} is no array")
    return cast("list[Any]", value)


def _map(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {value!r} is no object")
    return cast("dict[str, Any]", value)
