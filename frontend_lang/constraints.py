"""From the arguments of `gen` that say what its text must match to one constraint."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ramet.runtime.program.typed import Typed, typed, typed_json
from ramet.runtime.protocol import BadInputError, GrammarError

from .source import here


@dataclass(frozen=True, slots=True)
class ValueType:
    """How generated text becomes a value. ``parse`` raises ValueError for text that is none."""

    name: str
    parse: Callable[[str], Any]


Constrained = tuple[ValueType | None, dict[str, str] | None, tuple[str, ...]]
"""Type of the value, the constraint as plain data, and stop strings that come with the type."""


def constraint_of(
    *,
    dtype: Any,
    regex: str | None,
    json_schema: Any,
    grammar: str | None,
    choices: Sequence[str] | None,
    whitespace: str | None = None,
) -> Constrained:
    """Raises `BadInputError` for more than one constraint and for what is none, `GrammarError` for
    a schema that is no JSON."""
    if dtype is not None and regex is not None:
        warnings.warn("dtype and regex are both given; dtype wins", stacklevel=3)
        regex = None
    given = {
        "dtype": dtype,
        "regex": regex,
        "json_schema": json_schema,
        "grammar": grammar,
        "choices": choices,
    }
    names = check_alone(**given)
    if whitespace is not None:
        _check_whitespace(whitespace, names)
    if not names:
        return None, None, ()
    (name,) = names
    if name == "dtype":
        return _of_type(dtype, whitespace)
    if name == "json_schema":
        return _of_schema(json_schema, whitespace)
    if choices is not None:
        spec: Any = json.dumps(list(choices), ensure_ascii=False)
        return None, {"kind": "choice", "spec": spec}, ()
    spec = given[name]
    if not isinstance(spec, str):
        raise BadInputError(f"{name} must be a string", param=name, where=here() or None)
    return None, {"kind": "ebnf" if name == "grammar" else name, "spec": spec}, ()


def check_alone(**given: Any) -> list[str]:
    """Which constraints are given. Raises `BadInputError` that names them if there are several."""
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise BadInputError(
            f"at most one constraint can be given, not {' and '.join(names)}",
            param=names[0],
            where=here() or None,
        )
    return names


def _check_whitespace(whitespace: str, names: list[str]) -> None:
    if whitespace not in ("compact", "flexible"):
        raise BadInputError(
            f"whitespace must be 'compact' or 'flexible', not {whitespace!r}",
            param="whitespace",
            where=here() or None,
        )
    if names not in (["json_schema"], ["dtype"]):
        raise BadInputError(
            "whitespace needs json_schema or a dtype", param="whitespace", where=here() or None
        )


def _of_type(dtype: Any, whitespace: str | None) -> Constrained:
    try:
        found = typed(dtype)
    except BadInputError as error:
        raise BadInputError(error.message, param="dtype", where=here() or None) from None
    return _constrained(found, dtype, whitespace)


def _of_schema(schema: Any, whitespace: str | None) -> Constrained:
    try:
        found = typed_json(schema)
    except BadInputError as error:
        message, where = error.message, here() or None
        if isinstance(schema, str):
            raise GrammarError(message, where=where) from None
        raise BadInputError(message, param="json_schema", where=where) from None
    type_ = "JSON" if isinstance(schema, (str, dict, bool)) else schema
    return _constrained(found, type_, whitespace)


def _constrained(found: Typed, type_: Any, whitespace: str | None) -> Constrained:
    name = type_ if isinstance(type_, str) else getattr(type_, "__name__", str(type_))
    constraint: dict[str, str] = {"kind": found.kind, "spec": found.spec}
    if whitespace is not None and found.kind == "json_schema":
        constraint["whitespace"] = whitespace
    return ValueType(name, found.parse), constraint, found.stops
