"""Responses, with the openai SDK as its users have it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from ramet.runtime.gateway.http.responses.items import items_of, messages_of
from ramet.runtime.gateway.http.responses.output import Output
from ramet.runtime.gateway.http.responses.store import ResponseStore
from ramet.runtime.gateway.http.spoken import Thought
from ramet.runtime.gateway.http.state import HttpLimits
from ramet.runtime.gateway.http.tools.events import CallArguments, CallBegin, Content

PATH = "/v1/responses"
ASKED: dict[str, Any] = {"model": "fake", "input": "ab<eos>", "temperature": 0}


async def events_of(site, **body: Any) -> list[Any]:
    return [event async for event in await site.openai.responses.create(**body, stream=True)]


async def test_a_response(site):
    site.engine.says("h", "i")
    made = await site.openai.responses.create(**ASKED, instructions="s", metadata={"a": "b"})
    assert isinstance(made, Response)
    assert made.output_text == "hi"
    assert (made.status, made.model, made.object) == ("completed", "fake", "response")
    assert made.id.startswith("resp_")
    (message,) = made.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert made.metadata == {"a": "b"}
    tokenizer = site.world.tokenizer
    (prompt,) = site.engine.prompts
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "ab<eos>"}]
    assert tokenizer.decode(prompt, skip_special=False) == tokenizer.apply_chat_template(messages)
    assert tokenizer.id("<eos>") not in prompt
    usage = made.usage
    assert (usage.input_tokens, usage.output_tokens) == (len(prompt), 3)
    assert usage.total_tokens == len(prompt) + 3
    await site.idle()


async def test_the_sync_client(site):
    site.engine.says("h", "i")

    def ask() -> tuple[str, str]:
        with openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as client:
            whole = client.responses.create(**ASKED)
            stream = client.responses.create(**ASKED, stream=True)
            text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
            return whole.output_text, text

    assert await asyncio.to_thread(ask) == ("hi", "hi")


async def test_a_stream_tells_every_change_in_order(site):
    site.engine.says("h", "i")
    events = await events_of(site, **ASKED)
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "hi"
    assert {e.item_id for e in events if hasattr(e, "item_id")} == {events[2].item.id}
    whole = await site.openai.responses.create(**ASKED)
    last = events[-1].response
    assert last.output_text == whole.output_text == "hi"
    assert last.usage.output_tokens == whole.usage.output_tokens
    reply = await site.post(PATH, **ASKED, stream=True)
    assert "[DONE]" not in reply.text
    assert reply.text.startswith("event: response.created\ndata: {")


async def test_the_sdks_own_accumulation(site):
    site.engine.says("h", "i")
    async with site.openai.responses.stream(model="fake", input="ab") as stream:
        texts = [e.snapshot async for e in stream if e.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert texts == ["h", "hi"]
    assert final.output_text == "hi"


async def test_a_cut_answer_is_incomplete(site):
    site.engine.next_token = lambda tokens: 97
    made = await site.openai.responses.create(**ASKED, max_output_tokens=3)
    assert (made.status, made.output_text) == ("incomplete", "aaa")
    assert made.incomplete_details.reason == "max_output_tokens"
    assert made.output[0].status == "incomplete"
    events = await events_of(site, **ASKED, max_output_tokens=3)
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == "aaa"


async def test_an_empty_answer_is_an_empty_message(site):
    site.engine.says()
    made = await site.openai.responses.create(**ASKED)
    assert [part.text for part in made.output[0].content] == [""]
    events = await events_of(site, **ASKED)
    assert events[-1].response.output[0].content[0].text == ""


async def test_a_conversation_goes_on(site):
    site.engine.says("h", "i")
    first = await site.openai.responses.create(**ASKED, instructions="one")
    second = await site.openai.responses.create(
        model="fake", input="cd", previous_response_id=first.id, instructions="two"
    )
    third = await site.openai.responses.create(
        model="fake", input="e", previous_response_id=second.id
    )
    assert third.previous_response_id == second.id
    tokenizer = site.world.tokenizer
    said = [
        {"role": "user", "content": "ab<eos>"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "cd"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "e"},
    ]
    want = [[{"role": "system", "content": "two"}, *said[:3]], said]
    texts = [tokenizer.decode(ids, skip_special=False) for ids in site.engine.prompts[1:]]
    assert texts == [tokenizer.apply_chat_template(messages) for messages in want]
    listed = await site.openai.responses.input_items.list(third.id, order="asc")
    assert [item.role for item in listed.data] == ["user", "assistant"] * 2 + ["user"]


async def test_the_prompt_can_be_counted(site):
    site.engine.says("h")
    made = await site.openai.responses.create(**ASKED, instructions="s")
    asked = {"model": "fake", "input": "more", "previous_response_id": made.id}
    counted = await site.openai.responses.input_tokens.count(**asked)
    again = await site.openai.responses.create(**asked)
    assert counted.input_tokens == again.usage.input_tokens > made.usage.input_tokens
    with pytest.raises(openai.BadRequestError):
        await site.openai.responses.input_tokens.count(model="fake", input=[])


async def test_what_is_stored_can_be_read_and_forgotten(site):
    site.engine.says("h", "i")
    made = await site.openai.responses.create(**ASKED)
    again = await site.openai.responses.retrieve(made.id)
    assert again == made
    streamed = (await events_of(site, **ASKED))[-1].response
    assert await site.openai.responses.retrieve(streamed.id) == streamed
    await site.openai.responses.delete(made.id)
    for gone in (made.id, (await site.openai.responses.create(**ASKED, store=False)).id):
        with pytest.raises(openai.NotFoundError):
            await site.openai.responses.retrieve(gone)
        with pytest.raises(openai.NotFoundError) as caught:
            await site.openai.responses.create(**ASKED, previous_response_id=gone)
        assert caught.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError, match="has ended"):
        await site.openai.responses.cancel(streamed.id)


async def test_the_oldest_are_forgotten_first(new_site):
    site = await new_site(limits=HttpLimits(responses=2))
    site.engine.says("h")
    names = [(await site.openai.responses.create(**ASKED)).id for _ in range(2)]
    await site.openai.responses.retrieve(names[0])
    await site.openai.responses.create(**ASKED)
    await site.openai.responses.retrieve(names[0])
    with pytest.raises(openai.NotFoundError):
        await site.openai.responses.retrieve(names[1])


def test_the_store_is_bounded_in_bytes():
    store = ResponseStore(100, 1000)
    for number in range(20):
        store.put({"id": str(number), "output": [], "text": "x" * 80}, [])
    assert 1 < len(store) < 11
    store.put({"id": "19", "output": []}, [])
    held = sum(1 for number in range(20) if store.get(str(number)))
    assert held == len(store)
    store.put({"id": "big", "output": [], "text": "x" * 2000}, [])
    assert store.get("big") is None
    assert len(store) == held
    assert store.drop("19")
    assert not store.drop("19")


async def test_each_key_sees_its_own(new_site):
    site = await new_site(api_key=["one", "two"])
    site.engine.says("h")
    clients = [
        openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key=key, max_retries=0)
        for key in ("one", "two")
    ]
    made = await clients[0].responses.create(**ASKED)
    assert (await clients[0].responses.retrieve(made.id)).id == made.id
    with pytest.raises(openai.NotFoundError):
        await clients[1].responses.retrieve(made.id)
    for client in clients:
        await client.close()


async def test_in_the_background(site):
    site.engine.says("h", "i")
    site.engine.idle = True
    made = await site.openai.responses.create(**ASKED, background=True)
    assert made.status == "queued"
    with pytest.raises(openai.BadRequestError, match="not ended"):
        await site.openai.responses.create(**ASKED, previous_response_id=made.id)
    site.engine.idle = False
    while (made := await site.openai.responses.retrieve(made.id)).status == "queued":
        await asyncio.sleep(0.005)
    assert (made.status, made.output_text) == ("completed", "hi")


async def test_cancelled_in_the_background(site):
    site.engine.idle = True
    made = await site.openai.responses.create(**ASKED, background=True)
    await site.world.settle(lambda: bool(site.engine.running))
    cancelled = await site.openai.responses.cancel(made.id)
    assert cancelled.status == "cancelled"
    assert (await site.openai.responses.retrieve(made.id)).status == "cancelled"
    await site.idle()
    assert len(site.engine.aborted) == 1


async def test_cancelled_in_a_stream(site):
    site.engine.next_token = lambda tokens: 97
    stream = await site.openai.responses.create(**ASKED, max_output_tokens=400, stream=True)
    first = await anext(aiter(stream))
    cancelling = asyncio.create_task(site.openai.responses.cancel(first.response.id))
    events = [event async for event in stream]
    assert (await cancelling).status == "cancelled"
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "cancelled"
    await site.idle()


async def test_deleted_while_it_runs(site):
    site.engine.idle = True
    made = await site.openai.responses.create(**ASKED, background=True)
    await site.openai.responses.delete(made.id)
    await site.idle()
    with pytest.raises(openai.NotFoundError):
        await site.openai.responses.retrieve(made.id)


async def test_a_reader_that_goes_away(site):
    site.engine.next_token = lambda tokens: 97
    body = {**ASKED, "max_output_tokens": 400, "stream": True}
    async with site.http.stream("POST", PATH, json=body) as reply:
        lines = reply.aiter_lines()
        await anext(lines)
        name = json.loads((await anext(lines)).removeprefix("data: "))["response"]["id"]
    await site.idle()
    assert (await site.openai.responses.retrieve(name)).status == "cancelled"
    site.engine.idle = True
    waiting = asyncio.create_task(site.post(PATH, **ASKED))
    await site.world.settle(lambda: bool(site.engine.running))
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    await site.idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_dies_first_is_a_503(site, stream):
    site.engine.idle = True
    waiting = asyncio.create_task(site.post(PATH, **ASKED, stream=stream))
    await site.world.settle(lambda: bool(site.engine.running))
    site.engine.die()
    assert (await waiting).status_code == 503


async def test_an_engine_that_dies_in_a_stream_fails_the_response(site):
    site.engine.next_token = lambda tokens: 97
    stream = await site.openai.responses.create(**ASKED, max_output_tokens=400, stream=True)
    events = [await anext(aiter(stream))]
    site.engine.die()
    events += [event async for event in stream]
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed"
    assert events[-1].response.error.code == "server_error"


async def test_logprobs(site, scored):
    site.engine.says("x", "y")
    asked = {**ASKED, "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    made = await site.openai.responses.create(**asked)
    found = made.output[0].content[0].logprobs
    (prompt,) = site.engine.prompts
    assert found[0].logprob == pytest.approx(scored(prompt, ord("x")), abs=1e-5)
    assert [entry.token for entry in found[:2]] == ["x", "y"]
    assert found[0].top_logprobs[0].token == "x"
    events = await events_of(site, **asked)
    streamed = [
        entry.token
        for event in events
        if event.type == "response.output_text.delta"
        for entry in event.logprobs
    ]
    assert streamed == ["x", "y"]
    done = next(event for event in events if event.type == "response.output_text.done")
    assert [entry.token for entry in done.logprobs][:2] == ["x", "y"]


WRONG = (
    ({"input": None}, "input"), ({"input": []}, "input"), ({"input": 3}, "input"),
    ({"input": [{"type": "image_generation_call"}]}, "input[0]"),
    ({"input": [{"role": 3, "content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "output"),
    ({"n": 2}, "n:"), ({"max_output_tokens": 0}, "max_output_tokens"), ({"top_p": 3}, "top_p"),
    ({"include": ["file_search_call.results"]}, "include"), ({"truncation": "auto"}, "truncation"),
    ({"background": True, "store": False}, "background"),
    ({"background": True, "stream": True}, "background"), ({"conversation": "c"}, "conversation"),
    ({"text": {"format": 3}}, "text"), ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"), ({"tools": [{"type": "function"}]}, "name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "mcp"}}, "tool_choice"),
    ({"input": [{"type": "reasoning", "content": [3]}]}, "input[0].content"),
    ({"top_logprobs": 99}, "top_logprobs"),
    ({"input": "a" * 600}, "512"),
)  # fmt: skip


@pytest.mark.parametrize(("body", "named"), WRONG)
async def test_what_is_wrong_is_named(site, body, named):
    reply = await site.post(PATH, **{**ASKED, **body})
    assert reply.status_code == 400, reply.text
    assert named in reply.json()["error"]["message"]
    assert site.engine.submits == []


async def test_nulls_and_harmless_extras(site):
    site.engine.says("h")
    nulls = dict.fromkeys(
        ("instructions", "tools", "tool_choice", "text", "reasoning", "store", "stream", "metadata",
         "previous_response_id", "include", "truncation", "user", "background", "conversation")
    )  # fmt: skip
    extras = {
        "prompt_cache_key": "k", "safety_identifier": "s", "service_tier": "auto", "user": "me",
        "include": ["reasoning.encrypted_content"], "text": {"format": {"type": "text"}},
        "truncation": "disabled", "parallel_tool_calls": True, "reasoning": {"effort": "low"},
    }  # fmt: skip
    for more in (nulls, extras):
        reply = await site.post(PATH, **{**ASKED, **more})
        assert reply.status_code == 200, reply.text


def test_items_become_messages():
    items = items_of(
        [
            {"role": "developer", "content": "more"},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
                {"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [
                {"type": "output_text", "text": "b", "annotations": []}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
            {"type": "function_call_output", "call_id": "c2", "output": [
                {"type": "input_text", "text": "2"}]},
            {"type": "function_call", "call_id": "c3", "name": "f", "arguments": "{}"},
        ]
    )  # fmt: skip
    found = messages_of("be brief", items)
    roles = [message["role"] for message in found]
    assert roles == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert found[0]["content"] == "be brief\n\nmore"
    assert found[2]["content"] == "b"
    assert [call["id"] for call in found[2]["tool_calls"]] == ["c1", "c2"]
    assert found[4] == {"role": "tool", "tool_call_id": "c2", "content": "2"}
    assert found[5]["content"] is None
    assert found[2]["reasoning_content"] == "hm"
    assert not any("reasoning_content" in message for message in found[3:])


def test_thinking_text_and_calls_are_items_of_their_own():
    output = Output(iter(("c1", "c2")).__next__)
    spoken = [
        Thought("h"), Thought("m"), Content("a"), Content("b"), CallBegin(0, "f"),
        CallArguments(0, '{"x"'), CallArguments(0, ": 1}"), CallBegin(1, "g"),
        CallArguments(1, "{}"), Content("c"),
    ]  # fmt: skip
    events = [event for piece in spoken for event in output.push([piece])]
    events += output.finish("completed")
    kinds = [item["type"] for item in output.items]
    assert kinds == ["reasoning", "message", "function_call", "function_call", "message"]
    thought, text, first, second, last = output.items
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert text["content"][0]["text"] == "ab"
    assert (first["name"], first["arguments"]) == ("f", '{"x": 1}')
    assert (second["name"], second["arguments"]) == ("g", "{}")
    assert last["content"][0]["text"] == "c"
    assert (first["call_id"], second["call_id"]) == ("c1", "c2")
    assert output.thought == "hm"
    assert len({item["id"] for item in output.items}) == 5
    assert {item["status"] for item in output.items} == {"completed"}
    for place, item in enumerate(output.items):
        told = [event for event in events if event.get("output_index") == place]
        assert told[0]["type"] == "response.output_item.added"
        assert told[-1]["type"] == "response.output_item.done"
        assert told[-1]["item"] == item
        assert told[0]["item"]["status"] == "in_progress"
        deltas = "".join(event["delta"] for event in told if "delta" in event)
        whole = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert deltas == whole
