"""Forms and tools over HTTP with the real model: what is asked for is what comes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field
from ramet.runtime import launch

pytestmark = pytest.mark.model

ASK = [{"role": "user", "content": "Which animal barks?"}]
HOT = {"model": "small", "messages": ASK, "temperature": 1.0, "seed": 5, "max_tokens": 200}


class Leg(BaseModel):
    side: Literal["left", "right"]


class Animal(BaseModel):
    name: Literal["cat", "dog"]
    age: int = Field(ge=0, le=99)
    legs: list[Leg] = Field(max_length=2)


class Feed(BaseModel):
    animal: Animal
    grams: int = Field(ge=0, le=999)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    running = launch.start(
        {
            "model_path": "smollm2-135m-instruct", "dtype": "float32", "max_total_tokens": 8192,
            "context_length": 2048, "served_model_name": "small", "port": 0, "zmq_port": 0,
        },
        listen=True,
    )  # fmt: skip
    yield f"{running.url}/v1"
    running.stop()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as made:
        yield made


def chat(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(**{**HOT, **more}).choices[0]


def test_parse_gives_the_models_of_pydantic(client):
    for seed in range(3):
        done = client.chat.completions.parse(**{**HOT, "seed": seed}, response_format=Animal)
        assert isinstance(done.choices[0].message.parsed, Animal)
        assert done.choices[0].finish_reason == "stop"


def test_every_structured_output(client):
    said = chat(client, extra_body={"structured_outputs": {"choice": ["a dog", "a cat"]}})
    assert said.message.content in ("a dog", "a cat")
    said = chat(client, extra_body={"structured_outputs": {"regex": r"\d{3}-[a-f]{2}"}})
    assert re.fullmatch(r"\d{3}-[a-f]{2}", said.message.content)
    grammar = 'root ::= "yes" | "no" root'
    said = chat(client, extra_body={"structured_outputs": {"grammar": grammar}})
    assert re.fullmatch("(no)*yes", said.message.content) or said.finish_reason == "length"
    said = chat(client, response_format={"type": "json_object"})
    assert isinstance(json.loads(said.message.content), dict) or said.finish_reason == "length"


def tool(name: str, form: type[BaseModel] | None = None) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name, "description": f"to {name}"}
    if form is not None:
        function["parameters"] = form.model_json_schema()
    return {"type": "function", "function": function}


def test_tools_that_must_be_called(client):
    tools = [tool("feed", Feed), tool("pet", Animal), tool("wait")]
    forms = {"feed": Feed, "pet": Animal}
    for choice in (*forms, "required"):
        named = {"type": "function", "function": {"name": choice}}
        said = chat(client, tools=tools, tool_choice=named if choice in forms else choice)
        assert said.finish_reason == "tool_calls"
        (call,) = said.message.tool_calls
        if choice in forms:
            assert call.function.name == choice
        if call.function.name in forms:
            forms[call.function.name].model_validate_json(call.function.arguments)
        else:
            assert call.function.arguments == "{}"


def test_streamed_they_are_the_same(client):
    asked = {**HOT, "tools": [tool("feed", Feed)], "tool_choice": "required"}
    whole = client.chat.completions.create(**asked).choices[0].message.tool_calls[0]
    name, pieces = "", []
    for chunk in client.chat.completions.create(**asked, stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            name += call.function.name or ""
            pieces.append(call.function.arguments or "")
    assert (name, "".join(pieces)) == (whole.function.name, whole.function.arguments)
    assert len(pieces) > 3


def test_what_cannot_be_compiled_is_a_400_and_hurts_nobody(client):
    endless = {"structured_outputs": {"grammar": "root ::= root"}}
    with pytest.raises(openai.BadRequestError):
        chat(client, extra_body=endless)
    assert chat(client, max_tokens=4).finish_reason == "length"


async def test_at_the_same_time_each_has_its_own(url):
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

        async def one(number: int) -> None:
            if number % 3 == 0:
                await client.chat.completions.create(**{**HOT, "max_tokens": 20, "seed": number})
                return
            regex = rf"{number}(ab|cd)+{number}" if number % 3 == 1 else f"[a-z ]{{5,9}}{number}"
            done = await client.chat.completions.create(
                **{**HOT, "seed": number}, extra_body={"structured_outputs": {"regex": regex}}
            )
            said = done.choices[0]
            assert re.fullmatch(regex, said.message.content) or said.finish_reason == "length"

        await asyncio.gather(*(one(number) for number in range(12)))


THINKING = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}<think>
{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}{# up to </think> #}"""


def test_a_model_that_thinks_is_free_until_it_has_thought(tmp_path):
    (tmp_path / "thinking.jinja").write_text(THINKING)
    messages = []
    for question, thought, answer in (
        ("Is a dog an animal?", "A dog is alive.", "yes"),
        ("Is a stone an animal?", "A stone is not alive.", "no"),
        ("Is a cat an animal?", "A cat is alive.", "yes"),
    ):
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": f"{thought}\n</think>\n{answer}"})
    messages.append({"role": "user", "content": "Is a cow an animal?"})
    settings = {
        "model_path": "smollm2-135m-instruct", "dtype": "float32", "max_total_tokens": 4096,
        "context_length": 1024, "served_model_name": "small", "port": 0, "zmq_port": 0,
        "chat_template": str(tmp_path / "thinking.jinja"),
    }  # fmt: skip
    running = launch.start(settings, listen=True)
    try:
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
            asked = {"messages": messages, "temperature": 0, "max_tokens": 60}
            free = chat(client, **asked).message
            regex = {"structured_outputs": {"regex": "(maybe|never)[0-9]{2}"}}
            held = chat(client, **asked, extra_body=regex)
    finally:
        running.stop()
    assert free.reasoning_content
    assert held.message.reasoning_content == free.reasoning_content
    assert re.fullmatch("(maybe|never)[0-9]{2}", held.message.content)
    assert held.finish_reason == "stop"
