"""JSON schemas on the real model: what it writes is valid, or says that it was cut."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest


def obj(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


TEXT = {"type": "string", "maxLength": 24}
SCHEMAS: dict[str, dict[str, Any]] = {
    "integer": {"type": "integer"},
    "bounded": {"type": "integer", "minimum": -5, "maximum": 120},
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "text": TEXT,
    "one": {"type": "string", "minLength": 1, "maxLength": 1},
    "enum": {"enum": ["red", "dark green", 7, None, {"a": [1]}]},
    "pattern": {"type": "string", "pattern": "^[A-Z][a-z]{2,8}-[0-9]{3}$"},
    "date": {"type": "string", "format": "date"},
    "person": obj(name=TEXT, age={"type": "integer", "minimum": 0, "maximum": 150}),
    "keys": obj(
        first_name=TEXT,
        last_name=TEXT,
        date_of_birth={"type": "string", "format": "date"},
        country_of_residence={"enum": ["France", "Germany", "Spain"]},
        is_subscribed_to_newsletter={"type": "boolean"},
    ),
    "list": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 5},
    "nested": {
        "type": "array",
        "minItems": 1,
        "maxItems": 3,
        "items": {"type": "array", "items": obj(x={"type": "number"}), "maxItems": 2},
    },
    "tuple": {
        "type": "array",
        "prefixItems": [TEXT, {"type": "integer"}, {"type": "boolean"}],
        "items": False,
        "minItems": 3,
    },
    "optional": {
        "type": "object",
        "properties": {"a": TEXT, "b": {"type": "integer"}, "c": {"type": "null"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "any of": {"anyOf": [{"type": "integer"}, obj(value=TEXT), {"type": "null"}]},
    "reference": {
        "$defs": {"point": obj(x={"type": "integer"}, y={"type": "integer"})},
        **obj(start={"$ref": "#/$defs/point"}, end={"$ref": "#/$defs/point"}),
    },
    "unicode": obj(greeting={"const": 'naïve "ö" \\ 霍格'}, reply=TEXT),
    "map": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 3},
}
PROMPT = "Write one value as JSON, about a person or a place or whatever fits.\nJSON: "


def check(name: str, out: dict[str, Any]) -> None:
    reason = out["meta_info"]["finish_reason"]["type"]
    if reason == "length":
        return
    assert reason == "stop"
    try:
        value = json.loads(out["text"])
        jsonschema.validate(value, SCHEMAS[name])
    except (ValueError, jsonschema.ValidationError) as error:
        raise AssertionError(f"{name}: {out['text']!r}") from error


def generate(runtime: Any, each: int, **sampling: Any) -> int:
    """``each`` samples of every schema, all at once; how many were cut."""
    names = list(SCHEMAS)
    params = [
        {"json_schema": SCHEMAS[name], "n": each, "temperature": 1.0, "seed": 7, **sampling}
        for name in names
    ]
    outs = runtime.generate([PROMPT] * len(names), sampling_params=params)
    cut = 0
    for index, out in enumerate(outs):
        name = names[index // each]
        check(name, out)
        cut += out["meta_info"]["finish_reason"]["type"] == "length"
    return cut


def test_whatever_is_written_is_valid(runtime):
    # Numbers and free keys may go on and on.
    assert generate(runtime, 1, max_new_tokens=64) <= 6


def test_what_is_cut_says_so(runtime):
    out = runtime.generate(
        PROMPT, sampling_params={"json_schema": SCHEMAS["keys"], "max_new_tokens": 12}
    )
    assert out["meta_info"]["finish_reason"]["type"] == "length"
    assert out["meta_info"]["completion_tokens"] == 12
    assert out["text"].startswith('{"first_name":')


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("jump", [True, False])
def test_two_hundred_generations(runtime, jump):
    # Four of the schemas have no longest text.
    assert generate(runtime, 10, max_new_tokens=160, jump_forward=jump) <= 45


def greedy(runtime: Any, name: str, **more: Any) -> dict[str, Any]:
    return runtime.generate(
        PROMPT + name + ": ",
        sampling_params={
            "json_schema": SCHEMAS[name],
            "temperature": 0,
            "max_new_tokens": 48,
            **more,
        },
    )


@pytest.mark.parametrize("name", SCHEMAS)
def test_jumping_changes_no_text(runtime, name):
    steps = [runtime.server_info()["steps"]]
    outs = []
    for jump in (True, False):
        outs.append(greedy(runtime, name, jump_forward=jump))
        steps.append(runtime.server_info()["steps"])
    jumped, plain = outs
    assert jumped["text"] == plain["text"]
    assert jumped["output_ids"] == plain["output_ids"]
    assert steps[1] - steps[0] <= steps[2] - steps[1]
    if name == "keys":
        assert steps[1] - steps[0] < 0.6 * (steps[2] - steps[1])
