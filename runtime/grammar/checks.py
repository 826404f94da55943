"""What is wrong with a spec, found before anything is queued or compiled."""

from __future__ import annotations

from ..protocol.errors import GrammarError
from .checks_grammar import check_gbnf, is_lark
from .checks_regex import language_of
from .schema_lowering import lower_schema
from .spec import Spec

MAX_CHARACTERS = {"json_schema": 1_000_000, "ebnf": 200_000, "regex": 50_000}


def check_spec(spec: Spec) -> None:
    """Cheap and static. Raises `GrammarError` that names what is wrong and where; its message
    never holds the whole spec."""
    most = MAX_CHARACTERS.get(spec.kind)
    if most is not None and len(spec.text) > most:
        raise GrammarError(f"the {spec.kind} has {len(spec.text):,} characters; {most:,} may be")
    match spec.kind:
        case "regex" | "choice":
            language_of(spec)
        case "json_schema":
            lower_schema(spec.text)
        case "ebnf":
            if not is_lark(spec.text):
                check_gbnf(spec.text)
