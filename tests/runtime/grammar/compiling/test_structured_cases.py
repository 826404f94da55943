"""The cases of `cases/structured*.jsonl` with the real tokenizer, compiled as users compile."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from ramet.runtime.grammar import compile_spec
from ramet.runtime.protocol.errors import GrammarError

FILES = sorted((Path(__file__).parents[3] / "cases").glob("structured*.jsonl"))
CASES = [json.loads(line) for file in FILES for line in file.read_text().splitlines()]
DEADLINE = 10.0


def _compiled(case, tokenizer):
    """The grammar, or the error it is refused with; both in time."""
    begun = time.monotonic()
    try:
        return compile_spec(case["kind"], case["spec"], tokenizer, deadline=DEADLINE)
    except GrammarError as error:
        return error
    finally:
        assert time.monotonic() - begun < DEADLINE + 5


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_case(case, tokenizer, walks):
    grammar = _compiled(case, tokenizer)
    if isinstance(grammar, GrammarError):
        assert case["expect"] == "clear_error", str(grammar)
        assert 0 < len(str(grammar)) < 400
        return
    assert case["valid"] + case["invalid"], "an error is expected"
    assert [text for text in case["valid"] if not walks.takes(grammar, text)] == []
    assert [text for text in case["invalid"] if walks.takes(grammar, text)] == []


@pytest.mark.parametrize("kind", ["regex", "choice", "json_schema", "ebnf"])
def test_every_kind_is_pinned_to_llguidance_too(kind, tokenizer, walks):
    specs = {
        "regex": "[ab]{2}",
        "choice": ["aa", "ba", "bb", "ab"],
        "json_schema": {"enum": ["aa"]},
        "ebnf": "root ::= [ab] [ab]",
    }
    grammar = compile_spec(kind, specs[kind], tokenizer, backend="llguidance")
    assert grammar.kind == "llguidance"
    assert grammar.nbytes > 0
    assert walks.takes(grammar, '"aa"' if kind == "json_schema" else "aa")
    assert not walks.takes(grammar, "a")


def test_what_nobody_knows_is_refused(tokenizer):
    with pytest.raises(GrammarError, match="unknown kind"):
        compile_spec("yaml", "x", tokenizer)
    with pytest.raises(GrammarError, match="must be a string"):
        compile_spec("regex", 3, tokenizer)
    with pytest.raises(ValueError, match="unknown grammar backend"):
        compile_spec("regex", "a", tokenizer, backend="xgrammar")
    with pytest.raises(GrammarError, match="no backend takes this ebnf"):
        compile_spec("ebnf", 'root ::= "a" root | ""', tokenizer, backend="outlines")
