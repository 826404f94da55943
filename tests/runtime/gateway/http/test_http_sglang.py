"""What SGLang's own clients send, and what they read of the answers."""

from __future__ import annotations

import asyncio
import json

import pytest

SRT = {
    "skip_special_tokens": True, "spaces_between_special_tokens": True, "max_new_tokens": 4,
    "min_new_tokens": 0, "n": 1, "stop": [], "stop_token_ids": [], "stop_regex": [],
    "temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0,
    "presence_penalty": 0.0, "ignore_eos": False, "regex": None, "json_schema": None,
}  # fmt: skip
"""All that the frontend puts in, whether it was asked for or not."""


async def generated(site, **body):
    reply = await site.post("/generate", **body)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def test_the_endpoint_of_the_frontend(site):
    site.engine.next_token = lambda tokens: 97
    info = (await site.http.get("/get_model_info")).json()
    assert info["model_path"] == "models/fake"
    made = await generated(site, text="ab", sampling_params=SRT)
    assert made["text"] == "aaaa"
    meta = made["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (1, 4, 0)
    warm = await generated(site, text="ab", sampling_params={"max_new_tokens": 0})
    assert warm["text"] == ""
    position = 0
    text = ""
    for line in await site.lines("/generate", text="ab", sampling_params=SRT):
        if line == "[DONE]":
            break
        chunk = json.loads(line)
        piece = chunk["text"][position:]
        position += len(piece)
        text += piece
        assert chunk["meta_info"]["prompt_tokens"] == 1
    assert text == "aaaa"


async def test_its_select(site, scored):
    """The prompt alone, then each choice behind it, then the choices by themselves."""
    prompt, choices = "xll", ["ab", "cd"]
    length = (await generated(site, text=prompt, sampling_params={"max_new_tokens": 0}))[
        "meta_info"
    ]["prompt_tokens"]
    replies = await generated(
        site,
        text=[prompt + choice for choice in choices],
        sampling_params={"max_new_tokens": 0, "temperature": 0},
        return_logprob=True,
        return_text_in_logprobs=True,
        logprob_start_len=max(length - 2, 0),
    )
    encode = site.world.tokenizer.encode
    for reply, choice in zip(replies, choices):
        entries = reply["meta_info"]["input_token_logprobs"]
        assert entries[-1][1:] == [encode(choice)[0], choice]
        want = scored(encode(prompt), encode(choice)[0])
        assert entries[-1][0] == pytest.approx(want, abs=1e-4)
        assert len(entries) == length + 1 - max(length - 2, 0)
        assert reply["meta_info"]["output_token_logprobs"] == []
    ids = [[entry[1] for entry in r["meta_info"]["input_token_logprobs"]] for r in replies]
    alone = await generated(
        site, input_ids=ids, sampling_params={"max_new_tokens": 0}, return_logprob=True
    )
    for reply, row in zip(alone, ids):
        entries = reply["meta_info"]["input_token_logprobs"]
        assert [entry[1] for entry in entries] == row
        assert [entry[0] is None for entry in entries] == [True, *[False] * (len(row) - 1)]


async def test_a_program_may_begin_with_a_generation(site):
    site.engine.next_token = lambda tokens: 97
    assert (await generated(site, text="", sampling_params=SRT))["text"] == "aaaa"
    assert site.engine.prompts[0] == [site.world.tokenizer.bos_id]


async def test_its_benchmark(site):
    site.engine.next_token = lambda tokens: 97
    sent = {
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 3, "ignore_eos": True},
        "lora_path": None, "return_logprob": False, "return_routed_experts": False,
        "logprob_start_len": -1,
    }  # fmt: skip
    for prompt in ({"text": "ab"}, {"input_ids": [97, 98]}):
        chunks = await site.lines("/generate", **prompt, **sent)
        assert chunks.pop() == "[DONE]"
        counts = [json.loads(chunk)["meta_info"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == 3
        assert json.loads(chunks[-1])["text"] == "aaa"
    with_logprobs = {**sent, "return_logprob": True}
    chunks = await site.lines("/generate", text="ab", **with_logprobs)
    last = json.loads(chunks[-2])["meta_info"]
    assert len(last["output_token_logprobs"]) == 3
    assert last["input_token_logprobs"] == []
    chunks = await site.lines("/generate", text="abx", **{**with_logprobs, "logprob_start_len": 0})
    for chunk in chunks[:-1]:
        entries = json.loads(chunk)["meta_info"]["input_token_logprobs"]
        assert [token for _, token, _ in entries] == site.world.tokenizer.encode("abx")
    info = (await site.http.get("/server_info")).json()
    assert info["internal_states"] == []
    assert info["tokenizer_path"] == "models/fake"
    assert info["max_total_num_tokens"] == 1
    for path in ("/get_server_info", "/health_generate", "/v1/models"):
        assert (await site.http.get(path)).status_code == 200
    assert (await site.http.post("/flush_cache")).status_code == 200


async def test_a_batch_may_differ_prompt_by_prompt(site):
    site.engine.next_token = lambda tokens: 97
    made = await generated(
        site,
        text=["ab", "cd"],
        rid=["one", "two"],
        sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2, "n": 2}],
        return_logprob=[True, False],
        top_logprobs_num=[1, 0],
    )
    assert [reply["text"] for reply in made] == ["a", "aa", "aa"]
    assert [reply["meta_info"]["id"] for reply in made] == ["one", "two", "two"]
    assert len(made[0]["meta_info"]["output_top_logprobs"][0]) == 1
    assert "output_token_logprobs" not in made[1]["meta_info"]


async def begun(site, count, **body):
    """A request whose prompts have all made a few tokens, and then no more."""
    site.engine.next_token = lambda tokens: 97
    task = asyncio.create_task(
        site.post("/generate", sampling_params={"max_new_tokens": 400}, **body)
    )
    await site.world.settle(
        lambda: len([r for r in site.engine.running.values() if len(r["tokens"]) > 4]) == count
    )
    site.engine.idle = True
    return task


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_aborted_ends_with_what_it_has(site, stream):
    running = await begun(site, 1, text="ab", rid="mine", stream=stream, return_logprob=True)
    again = await site.post("/generate", text="ab", rid="mine")
    assert (again.status_code, "running already" in again.text) == (400, True)
    assert (await site.post("/abort_request", rid="mine")).json() == {"aborted": 1}
    reply = await running
    assert reply.status_code == 200
    body = reply.text.split("data: ")[-2] if stream else reply.text
    answer = json.loads(body)
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "abort", "message": "the request was aborted"}
    assert meta["completion_tokens"] == len(answer["output_ids"]) > 2
    assert answer["text"] == "a" * meta["completion_tokens"]
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]
    await site.idle()
    assert len(site.engine.aborted) == 1


async def test_one_of_a_batch_is_aborted(site):
    running = await begun(site, 2, text=["ab", "cd"], rid=["one", "two"])
    again = await site.post("/generate", text=["x", "y"], rid=["three", "two"])
    assert again.status_code == 400
    assert (await site.post("/abort_request", rid="two")).json() == {"aborted": 1}
    site.engine.idle = False
    one, two = (await running).json()
    assert one["meta_info"]["finish_reason"]["type"] == "length"
    assert one["meta_info"]["completion_tokens"] == 400
    assert two["meta_info"]["finish_reason"]["type"] == "abort"
    assert (one["meta_info"]["id"], two["meta_info"]["id"]) == ("one", "two")
    assert (await site.post("/generate", text="x", rid="three")).status_code == 200


async def test_abort_all(site):
    running = await begun(site, 3, text=["ab", "cd", "x"])
    assert (await site.post("/abort_request", rid="", abort_all=True)).json() == {"aborted": 1}
    for answer in (await running).json():
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert answer["text"]
    await site.idle()


async def test_what_waits_can_be_aborted_too(site):
    site.engine.idle = True
    running = asyncio.create_task(site.post("/generate", text="ab", rid="mine"))
    await site.world.settle(lambda: bool(site.state.runs))
    await site.post("/abort_request", rid="mine")
    answer = (await running).json()
    assert (answer["text"], answer["output_ids"]) == ("", [])
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    await site.idle()


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "text"), ({"text": "a", "input_ids": [1]}, "text"), ({"text": []}, "empty"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid"),
        ({"text": ["a"], "rid": ["x", "y"]}, "rid"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": "a", "sampling_params": {"stop_regex": "a+"}}, "stop_regex"),
        ({"text": "a", "sampling_params": {"unheard_of": 1}}, "unheard_of"),
        ({"text": "a", "image_data": "x"}, "image_data"), ({"text": "a", "lora_path": "x"}, "lora"),
        ({"text": "a", "token_ids_logprob": [1]}, "token_ids_logprob"),
        ({"text": "a", "input_embeds": [[0.0]]}, "input_embeds"), ({"input_ids": [[]]}, "empty"),
        ({"text": "a", "session_params": {"id": 1}}, "session"),
    ],
)  # fmt: skip
async def test_what_cannot_be_is_refused(site, body, named):
    reply = await site.post("/generate", **body)
    assert reply.status_code == 400, reply.text
    assert named in reply.json()["error"]["message"]
