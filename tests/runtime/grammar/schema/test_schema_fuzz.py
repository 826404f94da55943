"""Random schemas and instances, held against jsonschema."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest
from ramet.runtime.protocol.errors import GrammarError


def _check(schemas, make, seeds) -> dict[str, int]:
    counts = dict.fromkeys(("refused", "valid", "invalid", "generated"), 0)
    for seed in seeds:
        maker = make(seed)
        schema = maker.schema
        oracle = jsonschema.Draft202012Validator(schema)
        try:
            grammar = schemas.compile(schema)
        except GrammarError:
            counts["refused"] += 1
            continue
        for _ in range(6):
            value = maker.instance()
            valid = oracle.is_valid(value)
            texts = schemas.texts(value)
            taken = [text for text in texts if schemas.takes(grammar, text)]
            assert valid or not taken, f"unsound: {seed} {schema} takes {taken[:1]}"
            assert taken or not valid or len(texts) == schemas.MOST, (
                f"wrongly refused: {seed} {schema} {texts[:1]}"
            )
            escaped = json.dumps(value, separators=(",", ":"))
            assert valid or not schemas.takes(grammar, escaped), f"unsound: {seed} {escaped}"
            counts["valid" if valid else "invalid"] += 1
        draw = random.Random(seed)
        for _ in range(2):
            text = schemas.generate(grammar, draw)
            if text is not None:
                counts["generated"] += 1
                assert oracle.is_valid(json.loads(text)), f"unsound: {seed} {schema} makes {text}"
    return counts


def test_no_invalid_text_is_taken_and_no_valid_one_refused(schemas, random_schema):
    counts = _check(schemas, random_schema, range(500))
    assert counts["refused"] < 150
    assert counts["valid"] > 1000
    assert counts["invalid"] > 300
    assert counts["generated"] > 500


@pytest.mark.slow
def test_the_same_of_many_more(schemas, random_schema):
    _check(schemas, random_schema, range(1000, 9000))


def test_pretty_output_is_bounded_and_valid(schemas, random_schema):
    for seed in range(40):
        maker = random_schema(seed)
        try:
            grammar = schemas.compile(maker.schema, "flexible")
        except GrammarError:
            continue
        oracle = jsonschema.Draft202012Validator(maker.schema)
        draw = random.Random(seed)
        for _ in range(3):
            text = schemas.generate(grammar, draw)
            assert text is None or oracle.is_valid(json.loads(text))


def test_pretty_and_compact(schemas):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "null"}}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    pretty = json.dumps({"a": 1, "b": [None]}, indent=2)
    compact = '{"a":1,"b":[null]}'
    flexible = schemas.compile(schema, "flexible")
    assert schemas.takes(flexible, pretty)
    assert schemas.takes(flexible, compact)
    assert not schemas.takes(flexible, compact.replace(":1", ": " + " " * 60 + "1"))
    strict = schemas.compile(schema)
    assert schemas.takes(strict, compact)
    assert not schemas.takes(strict, pretty)
