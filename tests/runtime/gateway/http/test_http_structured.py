"""What requests ask of an answer's form, as the engine is asked for it."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Literal

import openai
import pytest
from pydantic import BaseModel
from ramet.runtime.grammar import checks, compile_spec
from ramet.runtime.protocol.errors import GrammarError

ASK = [{"role": "user", "content": "Who?"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


def asked_of(site):
    return site.engine.submits[-1].sampling.constraint


def tool(name, **parameters):
    function = {"name": name, **({"parameters": parameters} if parameters else {})}
    return {"type": "function", "function": function}


async def chat(site, **asked):
    asked = {"model": "fake", "messages": ASK, **asked}
    return (await site.openai.chat.completions.create(**asked)).choices[0]


@pytest.mark.parametrize("path", ["chat", "completions"])
@pytest.mark.parametrize(
    ("asked", "kind", "spec"),
    [
        ({"response_format": FORMAT}, "json_schema", SCHEMA),
        ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json_object": True}}, "json_schema", {"type": "object"}),
        ({"structured_outputs": {"regex": "[0-9]+", "json": None}}, "regex", "[0-9]+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"]),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "ebnf", 'root ::= "a"'),
    ],
)
async def test_each_form_is_one_constraint(site, path, asked, kind, spec):
    site.engine.says("x")
    if path == "chat":
        await chat(site, extra_body=asked)
    else:
        await site.openai.completions.create(model="fake", prompt="a", extra_body=asked)
    found = asked_of(site)
    assert found.kind == kind
    assert found.after == ""
    assert (json.loads(found.spec) if kind in ("json_schema", "choice") else found.spec) == spec


@pytest.mark.parametrize(
    ("params", "kind"),
    [({"regex": "a+"}, "regex"), ({"json_schema": json.dumps(SCHEMA)}, "json_schema"),
     ({"ebnf": 'root ::= "a"'}, "ebnf")],
)  # fmt: skip
async def test_sglangs_names_for_generate(site, params, kind):
    site.engine.says("x")
    reply = await site.post("/generate", text="a", sampling_params=params)
    assert reply.status_code == 200, reply.text
    (name,) = params
    assert (asked_of(site).kind, asked_of(site).spec) == (kind, params[name])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": ASK}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/generate", {"text": "a"}),
    ],
)
async def test_jumping_can_be_left_off(site, path, body):
    asked = {"jump_forward": False}
    site.engine.says("x")
    given = {"sampling_params": asked} if path == "/generate" else asked
    reply = await site.post(path, **body, **given)
    assert reply.status_code == 200, reply.text
    assert site.engine.submits[-1].sampling.jump_forward is False


async def test_nothing_asked_nothing_constrained(site):
    site.engine.says("x")
    await chat(site, response_format={"type": "text"})
    assert asked_of(site) is None


@pytest.mark.parametrize(
    ("field", "write"),
    [("guided_json", "json"), ("guided_regex", "regex"), ("guided_choice", "choice"),
     ("guided_grammar", "grammar")],
)  # fmt: skip
async def test_fields_of_the_past_say_what_to_write(site, field, write):
    with pytest.raises(openai.BadRequestError) as caught:
        await chat(site, extra_body={field: "x"})
    assert caught.value.param == field
    assert f'structured_outputs: {{"{write}"' in str(caught.value)
    assert site.engine.submits == []


@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": FORMAT, "structured_outputs": {"regex": "a"}},
        {"structured_outputs": {"regex": "a("}},
        {"structured_outputs": {"json": {"type": "strange"}}},
        {"structured_outputs": {"json": "{"}},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"structured_outputs": {"structural_tag": "{}"}},
        {"structured_outputs": {"json": SCHEMA, "whitespace": "pretty"}},
        {"structured_outputs": {"json": '{"const": "\\ud83d"}'}},
        {"response_format": {"type": "structural_tag"}},
        {"response_format": FORMAT, "tools": [tool("add")]},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/x"}}}},
        {"tools": [tool("add", properties={"a": {"$ref": "#/x"}})], "tool_choice": "required"},
    ],
)
async def test_what_is_wrong_is_refused_before_it_is_queued(site, asked):
    with pytest.raises(openai.BadRequestError) as caught:
        await chat(site, extra_body=asked)
    assert caught.value.param in asked
    assert caught.value.param in str(caught.value)
    assert site.engine.submits == []
    await site.idle()


class Part(BaseModel):
    kind: Literal["a", "b"]


class Whole(BaseModel):
    name: str
    parts: list[Part]


async def test_the_sdk_parses_into_a_pydantic_model(site):
    site.engine.says(*'{"name":"x","parts":[{"kind":"b"}]}')
    done = await site.openai.chat.completions.parse(
        model="fake", messages=ASK, response_format=Whole
    )
    assert done.choices[0].message.parsed == Whole(name="x", parts=[Part(kind="b")])
    spec = json.loads(asked_of(site).spec)
    assert spec["properties"]["parts"]["items"] == {"$ref": "#/$defs/Part"}


class TestForcedCalls:
    async def test_a_named_tool(self, speaking):
        site = speaking()
        site.engine.says(*'{"name": "add", "arguments": {"a": 1}}')
        named = {"type": "function", "function": {"name": "add"}}
        tools = [tool("add", **SCHEMA), tool("note")]
        choice = await chat(
            site, tools=tools, tool_choice=named,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )  # fmt: skip
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
        assert site.world.tokenizer.decode(site.engine.prompts[-1]).endswith("<tool_call>\n")
        schema = json.loads(asked_of(site).spec)
        closed = {**SCHEMA, "additionalProperties": False}
        assert schema["properties"] == {"name": {"const": "add"}, "arguments": closed}
        assert schema["required"] == ["name", "arguments"]

    async def test_any_tool_with_references_that_still_lead_somewhere(self, speaking):
        site = speaking(None)
        site.engine.says(*'{"name": "whole", "arguments": {}}')
        tools = [tool("note"), tool("whole", **Whole.model_json_schema())]
        stream = await site.openai.chat.completions.create(
            model="fake", messages=ASK, tools=tools, tool_choice="required", stream=True
        )
        calls = [c for chunk in [chunk async for chunk in stream]
                 for c in chunk.choices[0].delta.tool_calls or []]  # fmt: skip
        assert calls[0].function.name == "whole"
        assert "".join(call.function.arguments for call in calls) == "{}"
        schema = json.loads(asked_of(site).spec)
        reference = schema["anyOf"][1]["properties"]["arguments"]["properties"]["parts"]["items"]
        found = schema
        for step in reference["$ref"].removeprefix("#/").split("/"):
            found = found[int(step)] if isinstance(found, list) else found[step]
        assert found["properties"]["kind"]["enum"] == ["a", "b"]
        nothing = schema["anyOf"][0]["properties"]["arguments"]
        assert nothing == {"type": "object", "properties": {}, "additionalProperties": False}

    async def test_schemas_are_closed_only_where_that_is_safe(self, site):
        site.world.executor.context_length = 1 << 14
        site.engine.says(*'{"name":"add","arguments":{}}')
        inner = {"type": "object", "properties": {"default": SCHEMA}}
        kept = {"type": "object", "properties": {}, "additionalProperties": {"type": "integer"}}
        both = {"type": "object", "properties": {}, "allOf": [SCHEMA, {"required": ["b"]}]}
        for parameters, want in (
            ({"type": "object", "properties": {"x": inner, "y": kept}, "default": SCHEMA}, None),
            (both, both),
        ):
            await chat(site, tools=[tool("add", **parameters)], tool_choice="required")
            found = json.loads(asked_of(site).spec)["properties"]["arguments"]
            if want is not None:
                assert found == want
                continue
            assert found["additionalProperties"] is False
            assert found["properties"]["y"] == kept
            assert found["properties"]["x"]["additionalProperties"] is False
            assert found["default"] == SCHEMA

    async def test_arguments_hold_what_the_tool_asks_for(self, site):
        site.world.executor.context_length = 1 << 14
        site.engine.says(*'{"name":"add","arguments":{}}')
        digit = {"enum": [1, 2]}
        b = {"type": "object", "properties": {"b": digit}, "required": ["b"]}
        data = {"$ref": "#/x"}
        for parameters, good, wrong in (
            # A name that is asked for and not declared.
            ({"properties": {"a": digit}, "required": ["a", "b"]}, ['{"a":1,"b":[]}'], ['{"a":1}']),
            # Data that looks like a reference, and a property of that name.
            ({"properties": {"a": {"const": data}}, "required": ["a"]}, ['{"a":{"$ref":"#/x"}}'],
             ['{"a":{"$ref":"#/properties/arguments/x"}}']),
            ({"properties": {"$ref": digit, "const": {"$ref": "#/properties/$ref"}},
              "required": ["$ref", "const"]}, ['{"$ref":1,"const":2}'], ['{"$ref":1,"const":3}']),
            # Anchors, and references by the schema's own URI.
            ({"properties": {"a": {"$ref": "#one"}}, "required": ["a"],
              "$defs": {"x/y": {"$anchor": "one", **digit}}}, ['{"a":1}'], ['{"a":3}']),
            ({"$id": "https://x.y/z", "properties": {"a": {"$ref": "https://x.y/z#/$defs/d"}},
              "required": ["a"], "$defs": {"d": digit}}, ['{"a":1}'], ['{"a":3}']),
            # What stands beside other parts for the same object is not closed.
            ({"properties": {"a": digit}, "required": ["a"], "anyOf": [b]}, ['{"a":1,"b":2}'],
             ['{"a":1}']),
            ({"$ref": "#/$defs/b", "properties": {"a": digit}, "required": ["a"],
              "$defs": {"b": b}}, ['{"b":2,"a":1}'], ['{"a":1}']),
            # An object, whatever else the schema takes or leaves out.
            ({"type": ["object", "null"], "properties": {}}, ["{}"], ["null"]),
            ({"anyOf": [b, {"type": "string"}]}, ['{"b":1}'], ['"x"']),
        ):  # fmt: skip
            for others in ([], [tool("other", properties={"a": {"$anchor": "one"}})]):
                tools = [*others, tool("add", **parameters)]
                await chat(site, tools=tools, tool_choice="required")
                grammar = compile_spec("json_schema", asked_of(site).spec, site.world.tokenizer)

                def takes(arguments, grammar=grammar):
                    text = f'{{"name":"add","arguments":{arguments}}}'
                    matcher = grammar.matcher()
                    ids = site.world.tokenizer.encode(text)
                    return all(map(matcher.accept, ids)) and matcher.can_end()

                assert all(map(takes, good)), parameters
                assert not any(map(takes, wrong)), parameters

    async def test_arguments_that_are_no_object(self, site):
        with pytest.raises(openai.BadRequestError, match="add must be an object, not string"):
            await chat(site, tools=[tool("add", type="string")], tool_choice="required")

    @pytest.mark.parametrize(
        ("parser", "answer", "end"),
        [
            ("llama3", '{"name":"add","parameters":{"a":1}}', "assistant"),
            ("mistral", '{"name":"add","arguments":{"a":1}}', "[TOOL_CALLS] ["),
            ("pythonic", '{"name":"add","parameters":{"a":1}}', "assistant"),
            ("deepseek", '{"name":"add","parameters":{"a":1}}', "assistant"),
        ],
    )
    async def test_in_the_form_of_each_parser(self, speaking, parser, answer, end):
        template = "{% for m in messages %}{{ m.content }}{{ tools }}{% endfor %}assistant"
        site = speaking(template, tool_parser=parser)
        site.engine.says(*answer)
        choice = await chat(site, tools=[tool("add", **SCHEMA)], tool_choice="required")
        assert choice.message.tool_calls[0].function.arguments == '{"a":1}'
        assert choice.message.content is None
        assert site.world.tokenizer.decode(site.engine.prompts[-1]).endswith(end)
        (key,) = set(json.loads(asked_of(site).spec)["properties"]) - {"name"}
        assert f'"{key}"' in answer

    async def test_what_cannot_be_chosen(self, site):
        for choice in ("other", {"type": "function", "function": {"name": "no"}}, {"type": "x"}):
            with pytest.raises(openai.BadRequestError) as caught:
                await chat(site, tools=[tool("add")], tool_choice=choice)
            assert caught.value.param == "tool_choice"


class TestThinking:
    async def test_no_mask_until_it_ends(self, speaking):
        site = speaking()
        site.engine.says(*'hm\n</think>{"a":1}')
        choice = await chat(site, response_format=FORMAT)
        assert asked_of(site).after == "</think>"
        assert site.world.tokenizer.decode(site.engine.prompts[-1]).endswith("<think>\n")
        assert (choice.message.reasoning_content, choice.message.content) == ("hm", '{"a":1}')

    async def test_a_call_behind_it(self, speaking):
        site = speaking()
        site.engine.says(*'hm</think>{"name":"add","parameters":{}}')
        choice = await chat(site, tools=[tool("add")], tool_choice="required")
        assert asked_of(site).after == "</think>"
        assert choice.message.reasoning_content == "hm"
        assert choice.message.tool_calls[0].function.name == "add"
        assert choice.message.content is None

    async def test_switched_off_the_mask_begins_at_once(self, speaking):
        site = speaking()
        site.engine.says("x")
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        await chat(site, response_format=FORMAT, extra_body=off)
        assert asked_of(site).after == ""


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"messages": ASK, "structured_outputs": {"regex": "x{2}" * 500}}),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "y{2}" * 500}}),
        ("/generate", {"text": "a", "sampling_params": {"regex": "z{2}" * 500}}),
    ],
)
async def test_looking_at_a_long_constraint_delays_nobody(site, monkeypatch, path, asked):
    begun, seen = threading.Event(), threading.Event()

    def slow(spec):
        begun.set()
        assert seen.wait(10)
        raise GrammarError("looked at", where="character 7")

    monkeypatch.setattr(checks, "check_spec", slow)
    reply = asyncio.ensure_future(site.post(path, **asked))
    while not begun.is_set():
        await asyncio.sleep(0.01)
    assert (await site.http.get("/health")).status_code == 200
    seen.set()
    assert (await reply).status_code == 400, (await reply).text
    assert "looked at (at character 7)" in (await reply).text
    assert site.engine.submits == []
