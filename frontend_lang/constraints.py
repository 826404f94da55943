"""From gen's ``dtype``, ``regex``, ``json_schema`` and ``grammar`` to one constraint."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from typing import Any, Literal

from ramet.runtime.protocol import BadInputError, GrammarError

from .source import here

DType = Literal["int", "float", "str", "bool"]

_DTYPES: dict[object, DType] = {
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
_REGEX: dict[DType, str] = {
    "int": r"[-+]?[0-9]+[ \n]*",
    "float": r"[-+]?[0-9]*\.?[0-9]+[ \n]*",
    "str": r'"[\w\d\s]*"',
    "bool": r"(True|False)",
}
_STOPS: dict[DType, tuple[str, ...]] = {"int": (" ", "\n"), "float": (" ", "\n")}


def constraint_of(
    *,
    dtype: object,
    regex: str | None,
    json_schema: str | dict[str, Any] | type | None,
    grammar: str | None,
    choices: Sequence[str] | None,
) -> tuple[DType | None, dict[str, str] | None, tuple[str, ...]]:
    """(type of the value, constraint as plain data, stop strings that come with the type)."""
    if dtype is not None and regex is not None:
        warnings.warn("dtype and regex are both given; dtype wins", stacklevel=3)
        regex = None
    kind = _dtype(dtype)
    specs: dict[str, str] = {}
    if kind is not None:
        specs["dtype"] = _REGEX[kind]
    if regex is not None:
        specs["regex"] = regex
    if json_schema is not None:
        specs["json_schema"] = _schema(json_schema)
    if grammar is not None:
        specs["grammar"] = grammar
    if choices is not None:
        specs["choices"] = json.dumps(list(choices), ensure_ascii=False)
    if len(specs) > 1:
        raise BadInputError(
            f"at most one constraint can be given, not {' and '.join(specs)}",
            param=next(iter(specs)),
            where=here() or None,
        )
    for name, spec in specs.items():
        if not isinstance(spec, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BadInputError(f"{name} must be a string", param=name, where=here() or None)
        form = {"dtype": "regex", "grammar": "ebnf", "choices": "choice"}.get(name, name)
        stops = _STOPS.get(kind, ()) if kind is not None else ()
        return kind, {"kind": form, "spec": spec}, stops
    return None, None, ()


def convert(text: str, kind: DType) -> int | float | str | bool:
    """The typed value of generated text. Raises ValueError where the text is no such value."""
    stripped = text.strip()
    if kind == "int":
        return int(stripped)
    if kind == "float":
        return float(stripped)
    if kind == "bool":
        if stripped not in ("True", "False"):
            raise ValueError(f"not a bool: {text!r}")
        return stripped == "True"
    if len(stripped) >= 2 and stripped[0] == stripped[-1] == '"':
        return stripped[1:-1]
    return text


def _dtype(dtype: object) -> DType | None:
    if dtype is None:
        return None
    try:
        return _DTYPES[dtype]
    except (KeyError, TypeError):
        raise BadInputError(
            f"dtype must be int, float, str or bool, not {dtype!r}",
            param="dtype",
            where=here() or None,
        ) from None


def _schema(schema: str | dict[str, Any] | type) -> str:
    if isinstance(schema, str):
        try:
            json.loads(schema)
        except ValueError as error:
            raise GrammarError(f"json_schema is not JSON: {error}", where=here() or None) from None
        return schema
    if isinstance(schema, dict):
        return json.dumps(schema)
    describe: Any = getattr(schema, "model_json_schema", None)
    if describe is None:
        raise BadInputError(
            "json_schema must be JSON text, a dict or a pydantic model",
            param="json_schema",
            where=here() or None,
        )
    return json.dumps(describe())
