"""Python types as constraints on what is generated, and the text back as a value.

Scalars are regexes that end where a number does in running text, ``Literal`` and enums are
choices, everything else is JSON of its schema (`json_types`). Imports nothing heavy.
"""

from __future__ import annotations

import enum
import json
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from ..protocol.errors import BadInputError
from .annotated import bounds_of
from .json_types import enum_values, json_schema_of
from .json_values import value_from_json

_SCALARS: dict[Any, str] = {
    int: "int",
    "int": "int",
    float: "float",
    "float": "float",
    str: "str",
    "str": "str",
    "string": "str",
    bool: "bool",
    "bool": "bool",
}
REGEXES = {
    "int": r"[-+]?[0-9]+[ \n]*",
    "float": r"[-+]?[0-9]*\.?[0-9]+[ \n]*",
    "str": r'"[\w\d\s]*"',
    "bool": r"(True|False)",
}
"""SGLang's: numbers may be followed by the space or line end that stops them."""
_STOPS: dict[str, tuple[str, ...]] = {"int": (" ", "\n"), "float": (" ", "\n")}


@dataclass(frozen=True)
class Typed:
    """A type as a constraint. ``spec``: a regex, a JSON list of choices or a JSON schema, as text.
    ``stops``: stop strings that come with it. ``parse``: generated text to a value, ValueError
    where it is none (text that was cut, say)."""

    kind: Literal["regex", "choice", "json_schema"]
    spec: str
    stops: tuple[str, ...]
    parse: Callable[[str], Any]


def typed(type_: Any) -> Typed:
    """What ``dtype=`` asks for: int, float, bool, str (or their names), a ``Literal``, an enum, or
    any type that has a JSON schema. Raises `BadInputError`."""
    name = _scalar(type_)
    if name is not None:
        return Typed("regex", REGEXES[name], _STOPS.get(name, ()), _PARSERS[name])
    if get_origin(type_) is typing.Annotated:
        inner, *metadata = get_args(type_)
        return typed_json(type_) if bounds_of(metadata) else typed(inner)
    values = _choices(type_)
    if values is not None:
        return _chosen(values, type_)
    try:
        return typed_json(type_)
    except BadInputError as error:
        raise BadInputError(error.message, param="dtype") from None


def typed_json(schema: Any) -> Typed:
    """What ``json_schema=`` asks for: JSON text, a dict, or a type. Raises `BadInputError`."""
    if isinstance(schema, str):
        try:
            json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise BadInputError(f"json_schema is not JSON: {error}", param="json_schema") from None
        return Typed("json_schema", schema, (), json.loads)
    if isinstance(schema, (Mapping, bool)):
        return Typed("json_schema", _dump(schema), (), json.loads)
    return Typed(
        "json_schema",
        _dump(json_schema_of(schema)),
        (),
        lambda text: value_from_json(schema, text),
    )


def _scalar(type_: Any) -> str | None:
    try:
        return _SCALARS.get(type_)
    except TypeError:  # not hashable
        return None


def _choices(type_: Any) -> list[tuple[Any, Any]] | None:
    """(what is written, value) of a ``Literal`` or an enum; None for other types."""
    if get_origin(type_) is Literal:
        return [(v.value if isinstance(v, enum.Enum) else v, v) for v in get_args(type_)]
    if isinstance(type_, type) and issubclass(type_, enum.Enum):
        return list(enum_values(type_).items())
    return None


def _chosen(values: list[tuple[Any, Any]], type_: Any) -> Typed:
    by_text = {str(written): value for written, value in values}
    if len(by_text) < len(values):
        raise BadInputError(f"two values of {type_} are written alike", param="dtype")

    def parse(text: str) -> Any:
        try:
            return by_text[text]
        except KeyError:
            raise ValueError(f"{text!r} is none of {', '.join(map(repr, by_text))}") from None

    return Typed("choice", json.dumps(list(by_text), ensure_ascii=False), (), parse)


def _dump(schema: Any) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInputError(f"json_schema is not JSON: {error}", param="json_schema") from None


def _bool(text: str) -> bool:
    stripped = text.strip()
    if stripped not in ("True", "False"):
        raise ValueError(f"not a bool: {text!r}")
    return stripped == "True"


def _quoted(text: str) -> str:
    stripped = text.strip()
    if len(stripped) >= 2 and stripped[0] == stripped[-1] == '"':
        return stripped[1:-1]
    raise ValueError(f"not a quoted string: {text!r}")


_PARSERS: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(text.strip()),
    "float": lambda text: float(text.strip()),
    "bool": _bool,
    "str": _quoted,
}
