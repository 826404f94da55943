"""Constraints as servers that speak OpenAI's API take them, and whether they were kept."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from ramet.runtime.program.executor import GenResult
from ramet.runtime.protocol import BadInputError, Constraint, GrammarError

_NAMES = {"regex": "regex", "choice": "choice", "ebnf": "grammar", "json_schema": "json"}


def constraint_fields(constraint: Constraint, chat: bool) -> dict[str, Any]:
    """The fields of a request: OpenAI's own for JSON in a chat, else the extension that servers of
    open models share."""
    spec = constraint.spec if constraint.kind in ("regex", "ebnf") else json.loads(constraint.spec)
    if chat and constraint.kind == "json_schema":
        schema = {"name": "value", "schema": spec, "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if constraint.kind not in _NAMES:
        raise BadInputError(f"unknown kind of constraint {constraint.kind!r}", param="constraint")
    return {"structured_outputs": {_NAMES[constraint.kind]: spec}}


def check_kept(constraint: Constraint, result: GenResult) -> None:
    """Raises `GrammarError` for an answer that shows that the server did not know the field: some
    ignore what they do not know."""
    reason = result.meta.finish_reason
    if reason is None or reason.type != "stop" or reason.matched is not None:
        return  # it was cut
    if not _KEPT.get(constraint.kind, _unknown)(constraint.spec, result.text):
        raise GrammarError(
            f"the server did not keep to the {constraint.kind}: it answered {result.text[:80]!r}"
        )


def _is_json(spec: str, text: str) -> bool:
    del spec
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _matches(spec: str, text: str) -> bool:
    try:
        return re.fullmatch(spec, text) is not None
    except re.error:  # a dialect that is the server's affair
        return True


def _unknown(spec: str, text: str) -> bool:
    del spec, text
    return True


_KEPT: dict[str, Callable[[str, str], bool]] = {
    "json_schema": _is_json,
    "regex": _matches,
    "choice": lambda spec, text: text in json.loads(spec),
}
