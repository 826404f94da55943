"""What an answer must look like: ``response_format``, ``structured_outputs``, tools that must be
called, each as one constraint of the runtime's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from ...program.constraint import SHORT, check_one
from ...protocol.errors import GrammarError
from ...protocol.sampling import Constraint
from .call_schema import call_schema
from .errors import bad, cut
from .tools.json_calls import JsonCallParser
from .tools.llama3 import Llama3Parser
from .tools.machine import ToolParser
from .tools.offered import Offer

_KINDS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "ebnf"}
_OBJECT = '{"type":"object"}'
_POLICIES = ("disable_any_whitespace", "whitespace", "disable_fallback")


def constraint_of(
    response_format: Mapping[str, Any] | None, structured: Mapping[str, Any] | None
) -> Constraint | None:
    """Raises `HttpError` for what is malformed, wrong, not supported, or given twice."""
    first = _of_format(response_format) if response_format is not None else None
    second = _of_structured(structured) if structured is not None else None
    if first is not None and second is not None:
        raise bad("give either response_format or structured_outputs", "structured_outputs")
    return _checked(first, "response_format") or _checked(second, "structured_outputs")


def _checked(constraint: Constraint | None, field: str) -> Constraint | None:
    """The same constraint. Raises `HttpError` that names the field for one that is wrong. Long ones
    are left to the checks behind, which let others go on meanwhile."""
    if constraint is not None and len(constraint.spec) <= SHORT:
        try:
            check_one(constraint)
        except GrammarError as error:
            raise bad(f"{field}: {error}", field) from None
    return constraint


def _of_format(form: Mapping[str, Any]) -> Constraint | None:
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint("json_schema", _OBJECT)
    if kind != "json_schema":
        raise bad(
            f"response_format: type {cut(str(kind), 40)} is not supported; text, json_object and"
            " json_schema are",
            "response_format",
        )
    inner = form.get("json_schema")
    if not isinstance(inner, Mapping) or not isinstance(inner.get("schema"), Mapping | bool):
        raise bad("response_format.json_schema.schema is missing", "response_format")
    return Constraint("json_schema", _json(inner["schema"]))


def _of_structured(form: Mapping[str, Any]) -> Constraint:
    name = "structured_outputs"
    given = [key for key in form if form[key] not in (None, False) and key not in _POLICIES]
    for key in given:
        if key not in _KINDS and key != "json_object":
            raise bad(f"{name}: {cut(key, 40)} is not supported", name)
    if len(given) != 1:
        raise bad(f"{name}: give one of json, json_object, regex, choice and grammar", name)
    policy = form.get("whitespace")
    if policy not in (None, "compact", "flexible"):
        raise bad(f"{name}.whitespace must be compact or flexible", name)
    (key,) = given
    value = form[key]
    flexible = form.get("disable_any_whitespace") is False or policy == "flexible"
    whitespace: Literal["compact", "flexible"] = "flexible" if flexible else "compact"
    if key == "json_object":
        return Constraint("json_schema", _OBJECT, whitespace)
    if key == "json":
        if not isinstance(value, Mapping | str):
            raise bad(f"{name}.json must be a JSON schema", name)
        return Constraint("json_schema", _json(value), whitespace)
    if key == "choice":
        texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
        if not texts or not value:
            raise bad(f"{name}.choice must be a list of texts", name)
        return Constraint("choice", _json(value))
    if not isinstance(value, str):
        raise bad(f"{name}.{key} must be a text", name)
    return Constraint(_KINDS[key], value)


def of_sampling_params(params: Mapping[str, Any]) -> Constraint | None:
    """``regex``, ``json_schema`` and ``ebnf`` as SGLang's ``sampling_params`` have them."""
    given = [name for name in ("regex", "json_schema", "ebnf") if params.get(name) is not None]
    if not given:
        return None
    if len(given) > 1:
        raise bad(f"sampling_params: {given[0]} and {given[1]} exclude each other", given[1])
    value = params[given[0]]
    if given[0] == "json_schema" and isinstance(value, Mapping | bool):
        value = _json(value)
    if not isinstance(value, str):
        raise bad(f"{given[0]} must be a text", given[0])
    return _checked(Constraint(given[0], value), given[0])


def call_form(
    parser: type[ToolParser], offer: Offer, thinking: bool
) -> tuple[Constraint, type[ToolParser], str]:
    """For an answer that must be a call: what it must match, what reads it, and the text that it
    begins with, which the prompt shall hold. Behind thinking, and where a model's own form is no
    JSON, a call is a bare object."""
    if thinking or not issubclass(parser, JsonCallParser) or parser.opening is None:
        parser, opening = Llama3Parser, ""
    else:
        opening = parser.opening
    key = parser.arguments_key
    wanted = offer.wanted
    starts = [""] if len(wanted) == 1 else [f"/anyOf/{place}" for place in range(len(wanted))]
    forms = [
        call_schema(tool["function"], key, f"{start}/properties")
        for tool, start in zip(wanted, starts)
    ]
    schema = forms[0] if len(forms) == 1 else {"anyOf": forms}
    constraint = _checked(Constraint("json_schema", _json(schema)), "tools")
    assert constraint is not None
    return constraint, parser, opening


def _json(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
