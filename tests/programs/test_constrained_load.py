"""Forty requests at once, half of them constrained, two by what nothing can compile in time."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
import ramet as rt


def schema(number: int) -> dict[str, Any]:
    keys = [f"key_{number}_{i}" for i in range(2 + number % 3)]
    return {
        "type": "object",
        "properties": {key: {"enum": [f"value {i}", i]} for i, key in enumerate(keys)},
        "required": keys,
        "additionalProperties": False,
    }


def catastrophe(number: int) -> dict[str, Any]:
    """All of forty choices of two patterns, whose product no automaton holds; or so many optional
    keys that the grammar's rows grow with each."""
    if number > 20:
        return {"type": "object", "properties": {f"key{i}": {"type": "null"} for i in range(4000)}}
    choices = [
        {"anyOf": [{"pattern": f"a{{{i},{90 + number}}}b"}, {"pattern": f"[ab]*a[ab]{{{i}}}c"}]}
        for i in range(20, 60)
    ]
    return {"type": "string", "allOf": choices}


@pytest.mark.slow
def test_forty_at_once_two_of_them_catastrophic(runtime, settled):
    seconds: dict[int, float] = {}

    def one(i: int) -> Any:
        params: dict[str, Any] = {"max_new_tokens": 64, "temperature": 0}
        if i in (4, 24):
            params["json_schema"] = catastrophe(i)
        elif i % 2 == 0:
            params["json_schema"] = schema(i // 4)
        began = time.monotonic()
        try:
            return runtime.generate(f"Request {i}: ", sampling_params=params)
        except rt.RametError as error:
            return error
        finally:
            seconds[i] = time.monotonic() - began

    free = [i for i in range(40) if i % 2]
    alone = {i: one(i)["text"] for i in free[:3]}
    with ThreadPoolExecutor(40) as pool:
        outs = list(pool.map(one, range(40)))
    for i, out in enumerate(outs):
        if i in (4, 24):
            assert isinstance(out, rt.GrammarError), out
            assert seconds[i] < 12
            assert len(str(out)) < 500
        elif i % 2 == 0:
            jsonschema.validate(json.loads(out["text"]), schema(i // 4))
        else:
            assert out["meta_info"]["completion_tokens"] > 0
    assert all(outs[i]["text"] == text for i, text in alone.items())
    settled(runtime)
    # Who was killed is replaced.
    again = runtime.generate("x", sampling_params={"json_schema": schema(77), "temperature": 0})
    jsonschema.validate(json.loads(again["text"]), schema(77))
