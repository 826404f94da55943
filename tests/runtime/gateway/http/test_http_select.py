"""`select` in programs over HTTP: what the boundary does, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest

PATH = "/v1/programs"


def program(**select: Any) -> dict[str, Any]:
    """The text is "pab"; with "cd" its end becomes the one token abcd."""
    fields = {"op": 1, "name": "x", "choices": [["cd"], ["x"]], **select}
    instructions = [{"type": "text", "parts": ["pab"]}, {"type": "select", **fields}]
    return {"instructions": instructions, "sampling": {"temperature": 0}}


@pytest.mark.parametrize(
    ("fields", "prompt", "tokens"),
    [
        ({}, "p", ["abcd"]),
        ({"boundary": "exact"}, "p", ["abcd"]),
        ({"boundary": "plain"}, "pab", ["cd"]),
    ],
)
async def test_the_boundary(site, fields, prompt, tokens):
    answer = (await site.post(PATH, program=program(**fields))).json()
    (value,) = [event for event in answer["events"] if event["type"] == "value"]
    assert value["value"] == answer["values"]["x"]
    first = value["meta"]["choices"][0]
    assert first["text"] == "cd"
    assert [text for _, _, text in first["input_token_logprobs"]] == tokens
    assert site.engine.prompts == [site.world.tokenizer.encode(prompt)]
    await site.idle()


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"boundary": "fuzzy"}, "fuzzy"),
        ({"method": "loudest"}, "loudest"),
    ],
)
async def test_what_there_is_not_is_refused(site, fields, complaint):
    reply = await site.post(PATH, program=program(**fields))
    assert reply.status_code == 400
    assert complaint in reply.json()["error"]["message"]


@pytest.mark.parametrize("choices", [[], [["x"], [""]]])
async def test_no_choice_and_an_empty_one_fail_the_instruction(site, choices):
    reply = await site.post(PATH, program=program(choices=choices))
    answer = reply.json()
    message = answer["error"]["message"] if answer.get("error") else str(answer)
    assert "choice" in message
    await site.idle()


async def test_each_method(site):
    for method in (
        "token_length_normalized",
        "greedy_token_selection",
        "unconditional_likelihood_normalized",
    ):
        answer = (await site.post(PATH, program=program(method=method))).json()
        assert answer["status"] == "completed"
        assert answer["values"]["x"] in ("cd", "x")
    await site.idle()
