"""Specs meant to keep a checker busy: checks run where requests arrive, so all must end soon."""

from __future__ import annotations

import time

import pytest
from ramet.runtime.grammar.checks import check_spec
from ramet.runtime.grammar.spec import Spec
from ramet.runtime.protocol.errors import GrammarError

SECONDS = 5.0
COUNT = 4_900


def _tangle() -> dict:
    defs = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 16} for i in range(10)}
    defs["a10"] = {"type": "string"}
    return {"allOf": [{"not": {"$ref": "#/$defs/a0"}}] * 2000, "$defs": defs}


def _twins() -> dict:
    defs: dict = {}
    for letter in "ab":
        for i in range(10):
            members = {name: {"$ref": f"#/$defs/{letter}{i + 1}"} for name in "xyz"}
            defs[f"{letter}{i}"] = {"type": "object", "required": [*"xyz"], "properties": members}
        defs[f"{letter}10"] = {"type": "string"}
    pairs = [{"$ref": "#/$defs/a0"}, {"$ref": "#/$defs/b0"}] * 6
    return {"allOf": [{"oneOf": pairs}] * 1000, "$defs": defs}


def _chain() -> dict:
    link = {"type": "object", "required": ["p"]}
    defs: dict = {
        str(i): {**link, "properties": {"p": {"$ref": f"#/$defs/{i + 1}"}}} for i in range(8000)
    }
    return {"$ref": "#/$defs/0", "$defs": {**defs, "8000": {}}}


def _nested() -> dict:
    schema: dict = {"type": "string"}
    for _ in range(20):
        schema = {"oneOf": [{"not": schema}, {"required": ["a"]}, {"required": ["b"]}]}
    return schema


HOSTILE = {
    "opposites of a tangle": ("json_schema", _tangle()),
    "twins that may differ": ("json_schema", _twins()),
    "a chain of references": ("json_schema", _chain()),
    "opposites of opposites": ("json_schema", _nested()),
    "too many parts": ("json_schema", {"anyOf": [{}] * 200_000}),
    "many members": ("json_schema", {"properties": {f"p{i}": {} for i in range(20_000)}}),
    "many values": ("json_schema", {"enum": list(range(100_000))}),
    "a long reference": ("json_schema", {"allOf": [{"$ref": "#" + "/a" * 30_000}] * 10}),
    "a pattern that would be tried in many ways": (
        "json_schema",
        {"required": ["a" * 60 + "c"], "patternProperties": {"^(a|a)*b$": {"type": "null"}}},
    ),
    "classes without end": ("json_schema", {"pattern": "[" * 400_000}),
    "classes and escapes": ("json_schema", {"pattern": r"[^a\\]\p{L" * 40_000}),
    "bounds near each other": (
        "json_schema",
        {"anyOf": [{"exclusiveMinimum": i, "maximum": i + 0.5} for i in range(20_000)]},
    ),
    "blank lines": ("ebnf", " \n" * 90_000 + 'root ::= "a"'),
    "quotes": ("ebnf", "root ::= " + '"' * 190_000),
    "groups": ("ebnf", "root ::= " + "(" * 190_000),
    "a chain of rules": (
        "ebnf",
        "root ::= r0\n"
        + "\n".join(f"r{i} ::= r{i + 1}" for i in range(COUNT))
        + f'\nr{COUNT} ::= "a"',
    ),
    "the chain from behind": (
        "ebnf",
        "\n".join(f"r{i + 1} ::= r{i}" for i in reversed(range(COUNT)))
        + f'\nr0 ::= "a"\nroot ::= r{COUNT}',
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_checks_end_soon(name):
    kind, spec = HOSTILE[name]
    begun = time.process_time()
    try:
        check_spec(Spec.of(kind, spec))
    except GrammarError as error:
        message = str(error)
    else:
        message = ""
    assert time.process_time() - begun < SECONDS
    assert len(message) < 400
