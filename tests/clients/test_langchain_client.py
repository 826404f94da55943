"""langchain-openai, unmodified."""

from __future__ import annotations

import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import SecretStr

TEXT = "Good morning. " + "This is said word for word, as all of it is. " * 3
MESSAGES = [SystemMessage("Be brief."), HumanMessage(f"Say [[{TEXT}]] to me")]


@pytest.fixture
def chat(echo: str) -> ChatOpenAI:
    return ChatOpenAI(
        model="echo", base_url=f"{echo}/v1", api_key=SecretStr("none"), max_retries=0, timeout=20
    )


def test_a_chat(chat):
    answer = chat.invoke(MESSAGES)
    assert answer.content == TEXT
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.response_metadata["model_name"] == "echo"
    usage = answer.usage_metadata
    assert usage is not None
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_a_chat_in_pieces(chat):
    pieces = list(chat.stream(MESSAGES, stream_usage=True))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert whole.content == TEXT
    assert len([piece for piece in pieces if piece.content]) > 1
    assert whole.usage_metadata == chat.invoke(MESSAGES).usage_metadata


async def test_many_chats_at_once(chat):
    answers = await chat.abatch([[HumanMessage(f"[[number {i}]]")] for i in range(20)])
    assert [answer.content for answer in answers] == [f"number {i}" for i in range(20)]
    streamed = [piece.content async for piece in chat.astream(MESSAGES)]
    assert "".join(map(str, streamed)) == TEXT


def test_logprobs(chat):
    answer = chat.bind(logprobs=True).invoke(MESSAGES)
    tokens = [entry["token"] for entry in answer.response_metadata["logprobs"]["content"]]
    assert "".join(tokens).startswith(TEXT)


def test_completions(echo):
    model = OpenAI(
        model="echo", base_url=f"{echo}/v1", api_key=SecretStr("none"), max_retries=0, timeout=20
    )
    assert model.invoke("[[one two]]") == "one two"
    assert model.batch(["[[a]]", "[[b]]"]) == ["a", "b"]
    assert "".join(model.stream("[[one two]]")) == "one two"
