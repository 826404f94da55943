"""Healing over HTTP: what /generate and programs take, and who else is told it is not theirs."""

from __future__ import annotations

import json

import pytest

HEALED = {"heal": True, "max_new_tokens": 8, "temperature": 0}


def asked(site):
    return site.engine.prompts[-1], site.engine.submits[-1].sampling.heal


@pytest.mark.parametrize("text", [{"text": "pab"}, {"input_ids": [112, 256]}])
async def test_generate_heals_a_prompt(site, text):
    site.engine.says("abcd", "x")
    reply = await site.post("/generate", **text, sampling_params=HEALED)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    assert answer["text"] == "cdx"
    assert asked(site) == ([112], b"ab")
    assert answer["meta_info"]["prompt_tokens"] == 1
    assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"]) == 3


async def test_generate_heals_in_pieces_and_each_of_a_batch_by_itself(site):
    site.engine.says("abcd", "x")
    reply = await site.post("/generate", text="pab", sampling_params=HEALED, stream=True)
    lines = [line[6:] for line in reply.text.split("\n\n") if line.startswith("data: {")]
    assert json.loads(lines[-1])["text"] == "cdx"
    for text in ("pab", "qab"):
        assert texts(await site.post("/generate", text=[text], sampling_params=[HEALED])) == ["cdx"]
    both = [HEALED, {**HEALED, "heal": False}]
    await site.post("/generate", text=["pab", "qab"], sampling_params=both)
    assert sorted(submit.sampling.heal for submit in site.engine.submits[-2:]) == [b"", b"ab"]


def texts(reply):
    assert reply.status_code == 200, reply.text
    return [answer["text"] for answer in reply.json()]


async def test_a_program_heals(site):
    site.engine.says("abcd", "x")
    instructions = [
        {"type": "text", "parts": ["pab"]},
        {"type": "gen", "op": 0, "name": "v", "sampling": {"heal": True}},
        {"type": "sync", "op": 1, "want": "text"},
    ]
    program = {"instructions": instructions, "sampling": {"temperature": 0}}
    reply = await site.post("/v1/programs", program=program)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    assert answer["status"] == "completed"
    assert answer["values"]["v"] == "cdx"
    assert [event["text"] for event in answer["events"] if event["type"] == "synced"] == ["pabcdx"]
    assert asked(site) == ([112], b"ab")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/generate", {"text": "a"}),
    ],
)
async def test_elsewhere_it_is_refused_by_name(site, path, body):
    reply = await site.post(path, **body, heal=True)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == "heal"
    assert "/generate" in error["message"]
    assert not site.engine.submits
    site.engine.says("x")
    assert (await site.post(path, **body, heal=False)).status_code == 200


@pytest.mark.parametrize("value", ["yes", 2, {"a": 1}])
async def test_it_is_on_or_off(site, value):
    reply = await site.post("/generate", text="a", sampling_params={"heal": value})
    assert reply.status_code == 400
    assert "heal" in reply.json()["error"]["message"]
