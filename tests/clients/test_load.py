"""Many requests at a time over the real model: the load test of every tutorial, and that what is
streamed, what is not, and what programs get are the same."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import openai
import pytest
import ramet as rt

pytestmark = pytest.mark.model

MODEL = "any/name:v1"
RULES = " ".join(f"Rule {i}: be brief, be kind, and name your sources." for i in range(85))
QUESTIONS = ["a colour", "a river", "an animal", "a metal", "a city", "a fruit", "a tool"]


async def test_twenty_chats_with_a_long_system_prompt_twice_in_a_row(served):
    async def ask(http: aiohttp.ClientSession, number: int) -> dict[str, Any]:
        body = {
            "model": MODEL,
            "messages": [
                {"role": "system", "content": RULES},
                {"role": "user", "content": f"Question {number}: name {QUESTIONS[number % 7]}."},
            ],
            "max_tokens": 60,
            "temperature": 0,
        }
        async with http.post(f"{served.url}/v1/chat/completions", json=body) as reply:
            assert reply.status == 200, await reply.text()
            return await reply.json()

    texts = []
    for turn in range(2):
        async with aiohttp.ClientSession() as http:
            answers = await asyncio.gather(*(ask(http, number) for number in range(20)))
        texts.append([answer["choices"][0]["message"]["content"] for answer in answers])
        assert all(texts[-1])
        for answer in answers:
            assert answer["model"] == MODEL
            assert 1200 < answer["usage"]["prompt_tokens"] < 1500
            assert 0 < answer["usage"]["completion_tokens"] <= 60
        cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
        assert sum(count > 1000 for count in cached) >= (20 if turn else 19)
    assert texts[0] == texts[1]
    async with aiohttp.ClientSession(served.url) as http, http.get("/server_info") as reply:
        info = await reply.json()
    assert info["pages"]["held"] == 0
    assert info["requests"] == {"running": 0, "waiting": 0}


async def test_64_at_a_time_streamed_whole_and_as_programs_are_the_same(served):
    """In float32, so the batch does not show; seeded draws as well as greedy ones, with stops."""
    prompts = [f"Once upon a time, {number} friends" for number in range(64)]
    stops = [[" the"], ["."], [], [", and", "\n"]]

    def asked(number: int) -> dict[str, Any]:
        drawn = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0}
        return {"max_tokens": 6 + number % 7, **drawn}

    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120
    ) as client:

        async def whole(number: int) -> tuple[Any, ...]:
            done = await client.completions.create(
                model=MODEL, prompt=prompts[number], stop=stops[number % 4] or None,
                **asked(number), extra_body={"return_token_ids": True},
            )  # fmt: skip
            (choice,) = done.choices
            return (
                choice.text,
                choice.finish_reason,
                choice.stop_reason,
                choice.token_ids,
                done.usage,
            )

        async def streamed(number: int) -> tuple[Any, ...]:
            stream = await client.completions.create(
                model=MODEL, prompt=prompts[number], stop=stops[number % 4] or None, stream=True,
                **asked(number), stream_options={"include_usage": True},
                extra_body={"return_token_ids": True},
            )  # fmt: skip
            text, ids, ended, usage = "", [], (None, None), None
            async for chunk in stream:
                usage = chunk.usage
                for choice in chunk.choices:
                    text += choice.text
                    ids += getattr(choice, "token_ids", None) or []
                    if choice.finish_reason is not None:
                        ended = choice.finish_reason, choice.stop_reason
            return text, *ended, ids, usage

        first = await asyncio.gather(*map(whole, range(64)))
        second = await asyncio.gather(*map(streamed, range(64)))
    for number in range(64):
        # What was cached differs, and only that.
        for answer in (first[number], second[number]):
            answer[-1].prompt_tokens_details.cached_tokens = 0
        assert first[number] == second[number]
        text, reason, stopped, _, _ = first[number]
        assert not any(stop in text for stop in stops[number % 4])
        assert "\ufffd" not in text
        assert stopped is None or stopped in stops[number % 4]
        if reason == "length":
            assert stopped is None
            assert len(first[number][3]) == 6 + number % 7
        else:
            assert reason == "stop"

    address = next(a for a in served.addresses if a.startswith("tcp://"))
    backend = rt.RuntimeEndpoint(address)
    try:
        params = []
        for number in range(64):
            given = asked(number)
            given["max_new_tokens"] = given.pop("max_tokens")
            params.append({**given, "stop": stops[number % 4]})
        third = await asyncio.to_thread(backend.generate, prompts, sampling_params=params)
    finally:
        backend.shutdown()
    for number in range(64):
        assert first[number][0] == third[number]["text"]
        assert first[number][3] == third[number]["output_ids"]
