"""litellm, unmodified."""

from __future__ import annotations

import asyncio
from typing import Any

import litellm
import pytest

pytestmark = pytest.mark.filterwarnings("ignore")  # its own

MESSAGES = [{"role": "user", "content": "Say [[Good morning to you.]]"}]


@pytest.fixture
def asked(echo: str) -> dict[str, Any]:
    return {
        "model": "hosted_vllm/echo", "api_base": f"{echo}/v1", "api_key": "none", "timeout": 20,
        "num_retries": 0,
    }  # fmt: skip


def test_a_chat(asked):
    for model in ("hosted_vllm/echo", "openai/echo"):
        done = litellm.completion(**{**asked, "model": model}, messages=MESSAGES, temperature=0)
        assert done.choices[0].message.content == "Good morning to you."
        assert done.choices[0].finish_reason == "stop"
        assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens


def test_a_chat_in_pieces(asked):
    stream = litellm.completion(
        **asked, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Good morning to you."
    whole = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert whole.choices[0].message.content == text
    assert whole.usage.completion_tokens == 6


async def test_many_chats_at_once(asked):
    jobs = [
        litellm.acompletion(
            **asked, messages=[{"role": "user", "content": f"[[number {i}]]"}], max_tokens=20
        )
        for i in range(20)
    ]
    answers = await asyncio.gather(*jobs)
    assert [a.choices[0].message.content for a in answers] == [f"number {i}" for i in range(20)]


def test_a_completion(asked):
    done = litellm.text_completion(
        **{**asked, "model": "text-completion-openai/echo"},
        prompt="[[one two three]]",
        max_tokens=2,
    )
    assert done.choices[0].text == "one two"
    assert done.choices[0].finish_reason == "length"


def test_a_wrong_model_is_litellms_own_error(asked):
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**asked, "model": "hosted_vllm/other"}, messages=MESSAGES)
