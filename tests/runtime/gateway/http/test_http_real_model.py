"""HTTP over the real model: the same tokens as the Python path, through ``listen``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import ramet as rt
from ramet.runtime import launch

pytestmark = pytest.mark.model

LONG = " ".join(f"Rule {i}: be brief, be kind, and name your sources." for i in range(60))


@pytest.fixture(scope="module")
def served() -> Iterator[Any]:
    running = launch.start(
        {
            "model_path": "smollm2-135m-instruct", "dtype": "float32", "max_total_tokens": 8192,
            "context_length": 4096, "served_model_name": "small", "port": 0, "zmq_port": 0,
        },
        listen=True,
    )  # fmt: skip
    yield running
    running.stop()


@pytest.fixture(scope="module")
def client(served: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120
    ) as made:
        yield made


@pytest.fixture(scope="module")
def programs(served: Any) -> Iterator[rt.RuntimeEndpoint]:
    address = next(a for a in served.addresses if a.startswith("tcp://"))
    backend = rt.RuntimeEndpoint(address)
    yield backend
    backend.shutdown()


def test_completions_are_those_of_programs(client, programs):
    for prompt in ("The capital of France is", "1, 2, 3, 4,"):
        params = {"max_new_tokens": 16, "temperature": 0}
        want = programs.generate(prompt, sampling_params=params)
        done = client.completions.create(model="small", prompt=prompt, max_tokens=16, temperature=0)
        assert done.choices[0].text == want["text"]
        assert done.usage.prompt_tokens == want["meta_info"]["prompt_tokens"]
        seeded = {"max_new_tokens": 16, "temperature": 0.8, "seed": 7}
        want = programs.generate(prompt, sampling_params=seeded)
        done = client.completions.create(
            model="small", prompt=prompt, max_tokens=16, temperature=0.8, seed=7
        )
        assert done.choices[0].text == want["text"]


def test_a_chat_is_that_of_a_program(client, programs):
    @rt.function
    def ask(s):
        s += rt.user("Name a colour.")
        s += rt.assistant(rt.gen("answer", max_tokens=24, temperature=0))

    state = ask.run(backend=programs)
    asked = {
        "model": "small",
        "messages": [{"role": "user", "content": "Name a colour."}],
        "max_tokens": 24,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.content == state["answer"]
    content = whole.choices[0].logprobs.content
    assert content[0].top_logprobs[0].logprob == pytest.approx(content[0].logprob, abs=1e-4)
    stream = client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == state["answer"]
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
        whole.usage.total_tokens,
    )


def test_echo_scores_a_prompt_as_generation_does(client):
    made = client.completions.create(
        model="small", prompt="The sun is", max_tokens=8, temperature=0, logprobs=1
    )
    text = "The sun is" + made.choices[0].text
    scored = client.completions.create(
        model="small", prompt=text, max_tokens=0, echo=True, logprobs=1
    )
    logprobs = scored.choices[0].logprobs
    assert "".join(logprobs.tokens) == text
    assert logprobs.token_logprobs[-8:] == pytest.approx(
        made.choices[0].logprobs.token_logprobs, abs=2e-3
    )


async def test_twenty_chats_with_one_long_system_prompt_twice(served):
    async def one(http: httpx.AsyncClient, number: int) -> int:
        messages = [
            {"role": "system", "content": LONG},
            {"role": "user", "content": f"Number {number}?"},
        ]
        reply = await http.post(
            "/v1/chat/completions", json={"model": "small", "messages": messages, "max_tokens": 8}
        )
        assert reply.status_code == 200, reply.text
        return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    async with httpx.AsyncClient(base_url=served.url, timeout=120) as http:
        for turn in range(2):
            cached = await asyncio.gather(*(one(http, number) for number in range(20)))
            assert sum(count > 500 for count in cached) >= (20 if turn else 19)
        info = (await http.get("/server_info")).json()
        assert info["pages"]["held"] == 0
        assert info["requests"] == {"running": 0, "waiting": 0}


async def test_clients_that_go_away_leave_nothing(served):
    body = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as http:
        for _ in range(10):
            async with http.stream("POST", "/v1/completions", json=body) as reply:
                await anext(reply.aiter_lines())
        info = {}
        for _ in range(100):
            info = (await http.get("/server_info")).json()
            if info["requests"]["running"] == 0 and info["pages"]["held"] == 0:
                break
            await asyncio.sleep(0.05)
        assert (info["requests"], info["pages"]["held"]) == ({"running": 0, "waiting": 0}, 0)
        metrics = (await http.get("/metrics")).text
        assert 'vllm:num_requests_running{engine="0",model_name="small"} 0.0' in metrics
