"""Responses that call tools, think, and are held to a schema."""

from __future__ import annotations

import json

import pytest
from pydantic import BaseModel

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm é"}}\n</tool_call>'


def prompt_of(site) -> str:
    return site.world.tokenizer.decode(site.engine.prompts[-1], skip_special=False)


async def both(site, **asked):
    """The response in one piece, and what a stream of it ends with."""
    asked = {"model": "fake", "input": "How is it?", **asked}
    whole = await site.openai.responses.create(**asked)
    events = [event async for event in await site.openai.responses.create(**asked, stream=True)]
    return whole, events


def bare(response) -> list[dict]:
    items = [item.model_dump(exclude_none=True) for item in response.output]
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]


async def test_a_call_whole_and_streamed(speaking):
    site = speaking()
    site.engine.says(*f"Let me see.\n{CALL}\n{CALL}")
    whole, events = await both(site, tools=[WEATHER])
    message, first, second = whole.output
    assert message.content[0].text == "Let me see."
    assert (first.type, first.name, first.status) == ("function_call", "weather", "completed")
    assert json.loads(first.arguments) == json.loads(second.arguments) == {"city": "Ulm é"}
    assert first.call_id != second.call_id
    assert bare(events[-1].response) == bare(whole)
    done = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert [event.arguments for event in done] == [first.arguments] * 2
    deltas = [e for e in events if e.type == "response.function_call_arguments.delta"]
    for event in done:
        pieces = [delta.delta for delta in deltas if delta.item_id == event.item_id]
        assert "".join(pieces) == event.arguments
        assert len(pieces) > 1
    assert json.loads(prompt_of(site).split("TOOLS")[1].split("<|im_end|>")[0]) == {
        "type": "function",
        "function": {name: value for name, value in WEATHER.items() if name != "type"},
    }
    await site.idle()


async def test_results_go_back_in_either_way(speaking):
    site = speaking()
    site.engine.says(*CALL)
    first = await site.openai.responses.create(model="fake", input="How?", tools=[WEATHER])
    (call,) = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    await site.openai.responses.create(
        model="fake", input=[result], previous_response_id=first.id, tools=[WEATHER]
    )
    stored = prompt_of(site)
    items = [{"role": "user", "content": "How?"}, call.model_dump(exclude_none=True), result]
    await site.openai.responses.create(model="fake", input=items, tools=[WEATHER], store=False)
    assert prompt_of(site) == stored
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Ulm é"}}' in stored
    assert "<tool_response>rain</tool_response>" in stored


async def test_tools_that_must_be_called_are_a_constraint(speaking):
    site = speaking(reasoning_parser="none")
    for choice in ("required", {"type": "function", "name": "weather"}):
        site.engine.says(*'{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>')
        made = await site.openai.responses.create(
            model="fake", input="How?", tools=[WEATHER], tool_choice=choice
        )
        assert [(item.type, item.name) for item in made.output] == [("function_call", "weather")]
        assert site.engine.submits[-1].sampling.constraint.kind == "json_schema"
    none = await site.openai.responses.create(
        model="fake", input="How?", tools=[WEATHER], tool_choice="none"
    )
    assert none.output[0].type == "message"


async def test_thinking_is_an_item(speaking):
    site = speaking(reasoning_parser="qwen3")
    site.engine.says(*"<think>\nhm, well\n</think>\n\nIt rains.")
    whole, events = await both(site)
    thought, message = whole.output
    assert thought.type == "reasoning"
    assert thought.content[0].text == "hm, well"
    assert message.content[0].text == whole.output_text == "It rains."
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    assert bare(events[-1].response) == bare(whole)
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == "hm, well"
    await site.openai.responses.create(
        model="fake", input="And now?", previous_response_id=whole.id
    )
    assert "<think>hm, well</think>\nIt rains." in prompt_of(site)
    off = await site.openai.responses.create(
        model="fake", input="How?", extra_body={"chat_template_kwargs": {"enable_thinking": False}}
    )
    assert prompt_of(site).endswith("<think>\n\n</think>\n\n")
    assert off.status == "completed"


class Weather(BaseModel):
    city: str
    degrees: int


async def test_a_model_of_pydantic(site):
    site.world.executor.context_length = 1 << 14
    site.engine.says(*'{"city": "Ulm", "degrees": 3}')
    made = await site.openai.responses.parse(model="fake", input="How?", text_format=Weather)
    assert made.output_parsed == Weather(city="Ulm", degrees=3)
    constraint = site.engine.submits[-1].sampling.constraint
    assert constraint.kind == "json_schema"
    assert json.loads(constraint.spec)["required"] == ["city", "degrees"]
    assert made.text.format.type == "json_schema"


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        ({"text": {"format": {"type": "json_object"}}}, "json_schema"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice"),
        ({"structured_outputs": {"regex": "a+"}}, "regex"),
        ({"text": {"format": {"type": "text"}}}, None),
    ],
)
async def test_each_form_is_one_constraint(site, asked, kind):
    site.engine.says("a")
    reply = await site.post("/v1/responses", input="a", **asked)
    assert reply.status_code == 200, reply.text
    constraint = site.engine.submits[-1].sampling.constraint
    assert (None if constraint is None else constraint.kind) == kind
