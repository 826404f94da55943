"""SGLang's form of generation, and what tools ask beside generations."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest
from ramet.runtime.gateway.http.server import bind_http, is_loopback
from ramet.runtime.protocol.errors import BackendError, BadInputError


async def test_generate_in_one_piece(site, scored):
    site.engine.says("x", "y")
    reply = await site.post(
        "/generate", text="ab", return_logprob=True, rid="r", sampling_params={"temperature": 0}
    )
    answer = reply.json()
    meta = answer["meta_info"]
    assert answer["text"] == "xy"
    assert answer["output_ids"] == [120, 121, site.world.tokenizer.eos_ids[0]]
    assert meta["id"] == "r"
    assert meta["finish_reason"]["type"] == "stop"
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (1, 3)
    ids = site.world.tokenizer.encode("ab")
    value, token, text = meta["output_token_logprobs"][0]
    assert (value, token, text) == (pytest.approx(scored(ids, 120), abs=1e-5), 120, None)


async def test_a_batch_keeps_its_order(site):
    asked = {"sampling_params": {"temperature": 0, "max_new_tokens": 5}}
    batch = (await site.post("/generate", text=["ab", "cd"], **asked)).json()
    ids = [site.world.tokenizer.encode(text) for text in ("ab", "cd")]
    same = (await site.post("/generate", input_ids=ids, **asked)).json()
    alone = [(await site.post("/generate", text=text, **asked)).json() for text in ("ab", "cd")]
    assert [a["text"] for a in batch] == [a["text"] for a in alone] == [a["text"] for a in same]


async def test_a_stream_holds_all_so_far(site):
    asked = {"text": "ab", "sampling_params": {"temperature": 0, "max_new_tokens": 9, "seed": 1}}
    whole = (await site.post("/generate", **asked)).json()
    lines = await site.lines("/generate", **asked)
    assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    for before, after in itertools.pairwise(events):
        assert after["text"].startswith(before["text"])
        assert before["meta_info"]["finish_reason"] is None
    assert events[-1]["text"] == whole["text"]
    assert events[-1]["output_ids"] == whole["output_ids"]
    assert events[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]


async def test_scoring_only(site):
    reply = await site.post(
        "/generate",
        text="abx",
        return_logprob=True,
        logprob_start_len=0,
        sampling_params={"max_new_tokens": 0, "temperature": 0, "regex": None, "stop": []},
    )
    meta = reply.json()["meta_info"]
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"] == 2
    assert meta["input_token_logprobs"][0][0] is None


async def test_text_to_tokens_and_back(site):
    tokenizer = site.world.tokenizer
    found = (await site.post("/tokenize", prompt="ab<eos>c", return_token_strs=True)).json()
    assert found["tokens"] == tokenizer.encode("ab<eos>c")
    assert found["token_strs"] == ["ab", "<eos>", "c"]
    assert (found["count"], found["max_model_len"]) == (3, 512)
    back = (await site.post("/detokenize", tokens=found["tokens"])).json()
    assert back["prompt"] == "ab<eos>c"
    messages = [{"role": "user", "content": "hi"}]
    chat = (await site.post("/tokenize", messages=messages)).json()
    assert chat["tokens"] == tokenizer.encode(tokenizer.apply_chat_template(messages))
    assert (await site.post("/tokenize", prompt="")).json()["tokens"] == []


async def test_the_models_own_sampling_parameters_are_the_defaults(new_site):
    site = await new_site(defaults={"temperature": 0.25, "top_k": 7})
    await site.post("/v1/completions", prompt="a", max_tokens=1)
    await site.post("/v1/completions", prompt="a", max_tokens=1, temperature=1.5)
    first, second = (submit.sampling for submit in site.engine.submits)
    assert (first.temperature, first.top_k) == (0.25, 7)
    assert (second.temperature, second.top_k) == (1.5, 7)


async def test_a_salt_makes_a_namespace_of_its_own(site):
    for salt in (None, "a", "b", "a"):
        await site.post("/v1/completions", prompt="a", max_tokens=1, cache_salt=salt)
    spaces = [submit.namespace for submit in site.engine.submits]
    assert spaces[0] == b""
    assert spaces[1] == spaces[3]
    assert len(set(spaces)) == 3


async def test_what_runs_here(site):
    assert (await site.http.get("/health")).content == b""
    assert (await site.http.get("/ready")).status_code == 200
    assert (await site.http.get("/version")).json()["version"]
    info = (await site.http.get("/server_info")).json()
    assert (info["model"], info["context_length"], info["pages"]) == ("fake", 512, {"total": 1})
    model = (await site.http.get("/get_model_info")).json()
    assert (model["model_path"], model["is_generation"]) == ("models/fake", True)
    card = (await site.http.get("/v1/models")).json()["data"][0]
    assert (card["id"], card["max_model_len"]) == ("fake", 512)


async def test_flush_waits_or_refuses(site):
    site.engine.refuse_flush = 2
    assert (await site.http.post("/flush_cache")).json()["success"]
    site.engine.refuse_flush = 10**6
    reply = await site.http.get("/flush_cache", params={"timeout": 0.05})
    assert reply.status_code == 400
    assert "requests are running" in reply.json()["error"]["message"]
    for wrong in ("x", "-1", "nan", "1e9"):
        reply = await site.http.get("/flush_cache", params={"timeout": wrong})
        assert "timeout must be in" in reply.json()["error"]["message"]


async def test_the_server_describes_its_bodies(site):
    paths = (await site.http.get("/openapi.json")).json()["paths"]
    body = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"]["required"] == ["messages"]
    assert "temperature" in body["schema"]["properties"]
    assert set(paths) >= {"/v1/completions", "/generate", "/health", "/metrics"}


async def test_a_silent_engine_is_not_healthy(site):
    site.world.client_of_engine._heard -= 30
    reply = await site.http.get("/health")
    assert reply.status_code == 503
    assert "nothing for 3" in reply.json()["error"]["message"]  # seconds: 30, or a few more
    site.engine.beat()
    await site.world.settle(lambda: site.state.health() is None)
    assert (await site.http.get("/health")).status_code == 200


def test_where_it_listens():
    for host, local in (
        ("127.0.0.1", True),
        ("localhost", True),
        ("::1", True),
        ("0.0.0.0", False),
    ):
        assert is_loopback(host) == local
    with bind_http("127.0.0.1", 0) as taken, pytest.raises(BackendError, match="in use"):
        bind_http("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(BadInputError, match="no-such-host"):
        bind_http("no-such-host.invalid", 0)


async def test_a_server_that_stops_finishes_what_runs(new_site):
    site = await new_site()
    site.engine.idle = True
    running = asyncio.create_task(site.post("/v1/completions", prompt="a", max_tokens=3))
    await site.world.settle(lambda: bool(site.engine.running))
    closing = asyncio.create_task(site.server.close(5.0))
    await site.world.settle(lambda: site.state.draining)
    assert (await site.http.get("/ready")).status_code == 503
    site.engine.idle = False
    assert (await running).status_code == 200
    await closing
