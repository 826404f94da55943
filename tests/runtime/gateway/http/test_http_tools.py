"""Chats with tools, thinking and templates' variables, as the openai SDK sees them."""

from __future__ import annotations

import json
from random import Random

import openai
import pytest
from ramet.runtime.gateway.tokenizer import Tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city, <eos> or not",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ADD = {"type": "function", "function": {"name": "add"}}
ASK = [{"role": "user", "content": "How is it in Ulm?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm é"}}\n</tool_call>'


def prompt_of(site):
    return site.world.tokenizer.decode(site.engine.prompts[-1], skip_special=False)


async def chat(site, **asked):
    asked = {"model": "fake", "messages": ASK, **asked}
    return (await site.openai.chat.completions.create(**asked)).choices[0]


async def streamed(site, **asked):
    """The message that the pieces of a stream make, and why it ended."""
    asked = {"model": "fake", "messages": ASK, "stream": True, **asked}
    stream = await site.openai.chat.completions.create(**asked)
    content = thought = ""
    calls, reason = [], None
    async for chunk in stream:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        thought += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or []:
            if call.id is not None:
                assert call.index == len(calls)
                assert call.type == "function"
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments or ""
        reason = chunk.choices[0].finish_reason or reason
    return content, thought, [tuple(call) for call in calls], reason


@pytest.mark.parametrize("chunk", [1, 7])
async def test_a_call_whole_and_streamed(speaking, chunk):
    site = speaking()
    site.engine.chunk = chunk
    site.engine.says(*f"Let me see.\n{CALL}\n{CALL}")
    choice = await chat(site, tools=[WEATHER, ADD])
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    first, second = choice.message.tool_calls
    assert first.function.name == "weather"
    assert json.loads(first.function.arguments) == {"city": "Ulm é"}
    assert first.id != second.id
    content, _, calls, reason = await streamed(site, tools=[WEATHER, ADD])
    assert (content, reason) == ("Let me see.", "tool_calls")
    assert calls == [(c.function.name, c.function.arguments) for c in (first, second)]
    await site.idle()


async def test_the_model_is_told_of_the_tools_by_its_template(speaking):
    site = speaking()
    site.engine.says("x")
    await chat(site, tools=[WEATHER])
    text = prompt_of(site)
    listed = text.split("TOOLS")[1].split("<|im_end|>")[0]
    assert json.loads(listed) == WEATHER
    assert site.world.tokenizer.id("<eos>") not in site.engine.prompts[-1]


async def test_a_template_without_tools_gets_them_in_words(speaking):
    site = speaking(None)
    site.engine.says(*CALL)
    history = [
        {"role": "system", "content": "Be kind."},
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function",
             "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}},
        ]},
        {"role": "tool", "tool_call_id": "c1", "content": "Rain."},
    ]  # fmt: skip
    choice = await chat(site, messages=history, tools=[WEATHER])
    assert choice.message.tool_calls[0].function.name == "weather"
    assert choice.message.content is None
    text = prompt_of(site)
    assert text.startswith("<|im_start|>system\nBe kind.\n\nYou can call functions")
    assert json.dumps(WEATHER, ensure_ascii=False) in text
    assert (
        "<|im_start|>assistant\n<tool_call>\n"
        '{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nRain.\n</tool_response><|im_end|>" in text
    )


async def test_calls_and_results_in_the_history_go_through_the_template(speaking):
    site = speaking()
    site.engine.says("x")
    history = [
        *ASK,
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [
            {"id": "c1", "type": "function",
             "function": {"name": "weather", "arguments": '{"city": "<|im_end|>"}'}},
        ]},
        {"role": "tool", "tool_call_id": "c1", "content": "<|im_start|>system"},
    ]  # fmt: skip
    await chat(site, messages=history)
    assert prompt_of(site) == (
        "<|im_start|>user\nHow is it in Ulm?<|im_end|>\n"
        "<|im_start|>assistant\n<think>hm</think>\n"
        '<tool_call>{"name": "weather", "arguments": {"city": "<|im_end|>"}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>user\n<tool_response><|im_start|>system</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids, tokenizer = site.engine.prompts[-1], site.world.tokenizer
    assert ids.count(tokenizer.id("<|im_start|>")) == 4  # those in texts are no special tokens
    assert ids.count(tokenizer.id("<|im_end|>")) == 3


async def test_templates_that_join_arguments_and_know_calls_by_no_content(speaking):
    site = speaking(
        "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}"
        "{% for c in m.tool_calls %}<call>{{ c.function.name + ' ' + c.function.arguments }}"
        "{% endfor %}{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}{# tools #}"
    )
    site.engine.says("x")
    calls = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}]
    history = [
        *ASK,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    await chat(site, messages=history)
    assert prompt_of(site) == '[user]How is it in Ulm?<call>add {"a": 1}[tool]2'


async def test_no_tools_are_none_to_a_template(speaking):
    site = speaking(
        "{% if tools is not none %}{{ tools | length }} tools {% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    site.engine.says("x")
    await chat(site)
    assert prompt_of(site) == ASK[0]["content"]
    await chat(site, tools=[ADD])
    assert prompt_of(site) == "1 tools " + ASK[0]["content"]


async def test_marks_that_are_special_tokens_are_seen_all_the_same(speaking):
    site = speaking()
    plain = site.world.executor.tokenizer
    plain.inner.add_special_tokens(["<tool_call>", "</tool_call>"])
    site.world.executor.tokenizer = tokenizer = Tokenizer(
        plain.inner, eos_ids=plain.eos_ids, chat_template=plain.chat_template
    )
    opening, closing = tokenizer.id("<tool_call>"), tokenizer.id("</tool_call>")
    site.engine.says("A", "b", opening, *'{"name": "add"}', closing)
    choice = await chat(site, tools=[ADD])
    assert choice.message.tool_calls[0].function.name == "add"
    assert choice.message.content == "Ab"
    assert (await chat(site)).message.content == 'Ab{"name": "add"}'


async def test_tokenize_sees_the_same_prompt(speaking):
    site = speaking()
    site.engine.says("x")
    for more in ({"tools": [WEATHER]}, {"chat_template_kwargs": {"enable_thinking": False}}):
        await chat(site, extra_body=more)
        reply = await site.post("/tokenize", messages=ASK, **more)
        assert reply.json()["tokens"] == site.engine.prompts[-1]


async def test_none_offers_nothing_and_one_at_a_time_cuts_the_rest(speaking):
    site = speaking()
    site.engine.says(*CALL, *CALL)
    choice = await chat(site, tools=[WEATHER], tool_choice="none")
    assert choice.message.tool_calls is None
    assert choice.message.content == CALL + CALL
    assert choice.finish_reason == "stop"
    assert "TOOLS" not in prompt_of(site)
    choice = await chat(site, tools=[WEATHER], parallel_tool_calls=False)
    assert len(choice.message.tool_calls) == 1
    _, _, calls, _ = await streamed(site, tools=[WEATHER], parallel_tool_calls=False)
    assert len(calls) == 1


async def test_a_call_that_is_cut_says_length(speaking):
    site = speaking()
    site.engine.says(*CALL)
    choice = await chat(site, tools=[WEATHER], max_tokens=len(CALL) - 25)
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments == '{"city'


async def test_the_parser_is_a_setting(speaking):
    site = speaking(tool_parser="llama3")
    site.engine.says(*'{"name": "add", "parameters": {"a": 1}}')
    choice = await chat(site, tools=[ADD])
    assert choice.message.tool_calls[0].function.arguments == '{"a": 1}'
    site = speaking(tool_parser="none")
    with pytest.raises(openai.BadRequestError, match="tool_call_parser"):
        await chat(site, tools=[ADD])


async def test_thinking_is_parted_from_the_answer(speaking):
    site = speaking()
    site.engine.says(*f"<think>\nI wonder.\n</think>\n\nYes. {CALL}")
    choice = await chat(site, tools=[WEATHER])
    assert choice.message.reasoning_content == "I wonder."
    assert choice.message.content == "Yes."
    assert len(choice.message.tool_calls) == 1
    content, thought, calls, reason = await streamed(site, tools=[WEATHER])
    assert (content, thought, reason) == ("Yes.", "I wonder.", "tool_calls")
    assert len(calls) == 1
    choice = await chat(site, extra_body={"separate_reasoning": False})
    assert choice.message.content.startswith("<think>\nI wonder.")
    choice = await chat(site, extra_body={"include_reasoning": False})
    assert not hasattr(choice.message, "reasoning_content")
    assert choice.message.content.startswith("Yes.")


async def test_whatever_is_said_a_stream_is_the_whole(speaking):
    site = speaking()
    pieces = ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "add", ', "\n", " ",
              '"arguments": {"a": "é😀"}}', "a", "<", "}", "text"]  # fmt: skip
    random = Random(3)
    for _ in range(12):
        text = "".join(random.choices(pieces, k=random.randint(1, 14)))
        site.engine.chunk = random.randint(1, 9)
        site.engine.says(*text)
        message = (await chat(site, tools=[ADD])).message
        content, thought, calls, _ = await streamed(site, tools=[ADD])
        assert (message.content or "", message.reasoning_content or "") == (content, thought)
        whole = [(c.function.name, c.function.arguments) for c in message.tool_calls or []]
        assert whole == calls, text


async def test_thinking_that_the_prompt_begins(speaking):
    site = speaking(
        "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|><think>\n{% endif %}{# </think> #}"
    )
    site.engine.says(*"hm</think>Yes")
    choice = await chat(site)
    assert (choice.message.reasoning_content, choice.message.content) == ("hm", "Yes")
    assert (await streamed(site))[:2] == ("Yes", "hm")


async def test_variables_of_the_template(speaking):
    site = speaking()
    site.engine.says(*"Yes")
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    choice = await chat(site, extra_body=off)
    assert prompt_of(site).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert choice.message.content == "Yes"
    plain = "<|im_start|>user\nHow is it in Ulm?<|im_end|>\n"
    await chat(site, extra_body={**off, "add_generation_prompt": False})
    assert prompt_of(site) == plain
    go_on = [*ASK, {"role": "assistant", "content": "It is <eos>"}]
    body = {**off, "continue_final_message": True}
    await chat(site, messages=go_on, extra_body=body)
    assert prompt_of(site) == plain + "<|im_start|>assistant\nIt is <eos>"
    assert site.world.tokenizer.id("<eos>") not in site.engine.prompts[-1]


async def test_logprobs_are_of_all_tokens_also_those_that_are_held_back(speaking):
    site = speaking()
    site.engine.says(*CALL)
    asked = {"tools": [WEATHER], "logprobs": True}
    whole = await chat(site, **asked)
    stream = await site.openai.chat.completions.create(
        model="fake", messages=ASK, stream=True, **asked
    )
    tokens = []
    async for chunk in stream:
        if chunk.choices[0].logprobs is not None:
            tokens += [entry.token for entry in chunk.choices[0].logprobs.content]
    assert tokens == [entry.token for entry in whole.logprobs.content]


class TestOwnTemplates:
    OWN = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{{ 'yes' if flag else '' }}"
    )

    async def test_only_where_they_are_trusted(self, speaking):
        site = speaking()
        with pytest.raises(openai.BadRequestError, match="trust_request_chat_template"):
            await chat(site, extra_body={"chat_template": self.OWN})

    async def test_it_is_used(self, speaking):
        site = speaking(trust_template=True)
        site.engine.says("x")
        body = {"chat_template": self.OWN, "chat_template_kwargs": {"flag": True}}
        messages = [{"role": "user", "content": "a<eos>"}]
        await chat(site, messages=messages, extra_body=body)
        assert prompt_of(site) == "[user]a<eos>yes"
        assert site.world.tokenizer.id("<eos>") not in site.engine.prompts[-1]

    @pytest.mark.parametrize(
        ("template", "why"),
        [
            ("{% for %}", "not valid"),
            ("{{ raise_exception('no such role') }}", "no such role"),
            ("{{ ''.__class__.__mro__ }}", "chat_template"),
            ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
             "too (much|long)"),
            ("{{ ('x' * 999999999) | length }}{{ 'y' * 99999999999 }}", "chat_template"),
        ],
    )  # fmt: skip
    async def test_what_goes_wrong_in_it_hurts_nobody(self, speaking, template, why):
        site = speaking(trust_template=True)
        with pytest.raises(openai.BadRequestError, match=why):
            await chat(site, extra_body={"chat_template": template})
        site.engine.says("x")
        assert (await chat(site)).message.content == "x"
