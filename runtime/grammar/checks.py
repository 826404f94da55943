"""What is wrong with a spec, found before anything is queued or compiled."""

from __future__ import annotations

from ..protocol.errors import GrammarError
from .checks_grammar import check_gbnf, is_lark
from .checks_regex import language_of
from .schema_lowering import lower_schema
from .spec import Spec

MAX_CHARACTERS = 1_000_000


def check_spec(spec: Spec) -> None:
    """Cheap and static. Raises `GrammarError` that names what is wrong and where; its message
    never holds the whole spec."""
    if len(spec.text) > MAX_CHARACTERS:
        raise GrammarError(
            f"the {spec.kind} has {len(spec.text)} characters; {MAX_CHARACTERS} are the most"
        )
    match spec.kind:
        case "regex" | "choice":
            language_of(spec)
        case "json_schema":
            lower_schema(spec.text)
        case "ebnf":
            if not is_lark(spec.text):
                check_gbnf(spec.text)
