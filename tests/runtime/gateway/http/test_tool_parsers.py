"""Every way of writing calls: what is found, and that pieces give what the whole text gives."""

# ruff: noqa: E501 (texts of models are left as they are)

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ramet.runtime.config import settings as config_settings
from ramet.runtime.gateway.http.spoken import Speech, heard
from ramet.runtime.gateway.http.tools.events import CallArguments, CallBegin, Content, merged
from ramet.runtime.gateway.http.tools.registry import PARSERS, parser_class

NAMES = ("weather", "add", "note")
TEXTS = {
    "hermes": [
        ('<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>',
         "", [("weather", '{"city": "Ulm"}')]),
        (('Let me see.\n\n<tool_call>{"arguments": {"a": [1, {"b": "}"}]}, "name": "add"}</tool_call>'
         '\n<tool_call>\n{"name": "note"}\n</tool_call>\n'),
         "Let me see.", [("add", '{"a": [1, {"b": "}"}]}'), ("note", "{}")]),
        (('<tool_call>[{"name": "add", "arguments": {"x": "\\"]"}}, {"name": "note", '
         '"arguments": null}]</tool_call> Done.'),
         " Done.", [("add", '{"x": "\\"]"}'), ("note", "{}")]),
        ('a < b <tool_cal <tool_call> no', "a < b <tool_cal <tool_call> no", []),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        ('<tool_call>x<tool_call>{"name":"add","arguments":{}}</tool_call>',
         "<tool_call>x", [("add", "{}")]),
        (('<tool_call>{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}'
         '</tool_call>'), "", [("add", '{"a": 1}')]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
         "", [("add", '{"a": 1}')]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}, oops</tool_call>ok',
         "ok", [("add", '{"a": 1}')]),
        ('<tool_call>{"name": "add", "arguments": {"a": "un', "", [("add", '{"a": "un')]),
        ('one <tool_call>{"na', "one <tool_call>{\"na", []),
        ('  plain \n', "  plain \n", []),
    ],
    "llama3": [
        ('{"name": "weather", "parameters": {"city": "Ulm"}}',
         "", [("weather", '{"city": "Ulm"}')]),
        ((' {"type": "function", "name": "add", "parameters": {"a": 1}}; '
         '{"name": "note", "parameters": {}}'), "", [("add", '{"a": 1}'), ("note", "{}")]),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1.5e3}}',
         "", [("add", '{"a": 1.5e3}')]),
        ('Well <|python_tag|>{"name": "add", "parameters": {}}', "Well", [("add", "{}")]),
        ('{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
        ('{"answer": {"a": [1]}} and', '{"answer": {"a": [1]}} and', []),
        ("Just {text}", "Just {text}", []),
        ("<|python|>", "<|python|>", []),
        ('{"parameters": {"a": 1}, "name": "add"} then', " then", [("add", '{"a": 1}')]),
    ],
    "mistral": [
        (('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "note", '
         '"arguments": {"t": "]"}}]'), "", [("add", '{"a": 1}'), ("note", '{"t": "]"}')]),
        ('Hm.[TOOL_CALLS]add[ARGS]{"a": {}}[TOOL_CALLS]note{"t": "{"}',
         "Hm.", [("add", '{"a": {}}'), ("note", '{"t": "{"}')]),
        ('[TOOL_CALLS]add[CALL_ID]abcdef123[ARGS]{"a": 1}', "", [("add", '{"a": 1}')]),
        ("[TOOL_CALL] no [TOOL_CALLS", "[TOOL_CALL] no [TOOL_CALLS", []),
        ("[TOOL_CALLS]not a name{", "[TOOL_CALLS]not a name{", []),
    ],
    "pythonic": [
        ('[weather(city="Ulm"), add(a=1, b=[1, (2, True)], c={"k": None})]', "",
         [("weather", {"city": "Ulm"}), ("add", {"a": 1, "b": [1, [2, True]], "c": {"k": None}})]),
        ("[note()]", "", [("note", {})]),
        ("<|python_start|>[note(t='it\\'s, \"a)\"', u=-1.5, v=true, w=null)]<|python_end|>", "",
         [("note", {"t": 'it\'s, "a)"', "u": -1.5, "v": True, "w": None})]),
        ("[1, 2] are numbers", "[1, 2] are numbers", []),
        ("[add(a=open('x'))]", "[add(a=open('x'))]", []),
        ("[other(a=1)]", "[other(a=1)]", []),
        ("[add(a=1), other()]", ", other()]", [("add", {"a": 1})]),
        ("[add(a=1e999)]", "[add(a=1e999)]", []),
        ("Text [add(a=1)]", "Text [add(a=1)]", []),
        ("[note(t='two\nlines')]", "", [("note", {"t": "two\nlines"})]),
        ("[add(a=1", "[add(a=1", []),
    ],
    "deepseek": [
        (("I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
         '{"a": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>note\n```json\n'
         "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
         "I look.", [("add", '{"a": 1}'), ("note", "{}")]),
        (('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": "<｜"}<｜tool▁call▁end｜>'
         '<｜tool▁calls▁end｜>'), "", [("add", '{"a": "<｜"}')]),
        ("<｜tool▁call▁begin｜>add<｜tool▁sep｜>3", "<｜tool▁call▁begin｜>add<｜tool▁sep｜>3", []),
        ("a <｜tool", "a <｜tool", []),
    ],
}  # fmt: skip
CASES = [(name, *case) for name, cases in TEXTS.items() for case in cases]


def in_pieces(name, text, cuts):
    speech = Speech(tools=PARSERS[name](NAMES))
    edges = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    found = []
    for start, end in itertools.pairwise(edges):
        found += speech.push(text[start:end])
    return merged([*found, *speech.finish()])


def whole(name, text):
    return in_pieces(name, text, [])


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_what_is_found(name, text, content, calls):
    message = heard(Speech(tools=PARSERS[name](NAMES)), text)
    found = message.calls
    if calls and isinstance(calls[0][1], dict):
        found = [(tool, json.loads(arguments)) for tool, arguments in found]
    assert found == calls
    assert message.content == content


@pytest.mark.parametrize(("name", "text"), [case[:2] for case in CASES])
def test_character_by_character_gives_the_same(name, text):
    assert in_pieces(name, text, range(len(text))) == whole(name, text)


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<｜tool▁sep｜>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
    '{"name": "add", ', '"arguments": {"a": 1}}', '"parameters": {}}', '{"name"', "add", "[add(a=1)",
    "weather(", ")]", "[", "]", "{", "}", '"', "\\", ",", ";", ":", " ", "\n", "text", "<", "```",
    "function", "null", "é😀", "=", "'",
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(TEXTS)),
    st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join),
    st.lists(st.integers(0, 400), max_size=12),
)
@example("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}', [3, 30])
def test_any_split_of_any_text_gives_the_same_calls_and_content(name, text, cuts):
    events = in_pieces(name, text, cuts)
    assert events == whole(name, text)
    begun = [event.index for event in events if isinstance(event, CallBegin)]
    assert begun == list(range(len(begun)))
    if not begun and name != "llama3" and name != "deepseek":
        said = "".join(event.text for event in events if isinstance(event, Content))
        assert said == text  # what is no call is lost in no part


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
WRITTEN = {
    "hermes": lambda calls: "".join(
        f"<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>\n" for n, a in calls
    ),
    "llama3": lambda calls: "; ".join(
        json.dumps({"name": n, "parameters": a}, ensure_ascii=False) for n, a in calls
    ),
    "mistral": lambda calls: (
        "[TOOL_CALLS] " + json.dumps([{"name": n, "arguments": a} for n, a in calls], indent=1)
    ),
    "deepseek": lambda calls: (
        "<｜tool▁calls▁begin｜>"
        + "".join(
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{json.dumps(a)}\n```<｜tool▁call▁end｜>"
            for n, a in calls
        )
    ),
    "pythonic": lambda calls: (
        "["
        + ", ".join(f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls)
        + "]"
    ),
}
KEYS = st.sampled_from(["a", "b", "city", "x_1"])


@pytest.mark.parametrize("name", sorted(WRITTEN))
@settings(max_examples=60, deadline=None)
@given(
    calls=st.lists(
        st.tuples(st.sampled_from(NAMES), st.dictionaries(KEYS, JSON, max_size=3)),
        min_size=1, max_size=3,
    ),
    cuts=st.lists(st.integers(0, 900), max_size=9),
)  # fmt: skip
def test_calls_are_read_back_as_they_were_written(name, calls, cuts):
    events = in_pieces(name, WRITTEN[name](calls), cuts)
    assert [event.name for event in events if isinstance(event, CallBegin)] == [n for n, _ in calls]
    arguments = [""] * len(calls)
    for event in events:
        if isinstance(event, CallArguments):
            arguments[event.index] += event.text
    assert [json.loads(text) for text in arguments] == [a for _, a in calls]
    assert not any(isinstance(event, Content) for event in events)


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral", "deepseek"])
def test_arguments_stream_while_they_are_written(name):
    text = WRITTEN[name]([("add", {"a": "x" * 40})])
    speech = Speech(tools=PARSERS[name](NAMES))
    events = speech.push(text[: text.index("xxx") + 20])
    assert events[0] == CallBegin(0, "add")
    assert events[1].text.endswith("x" * 20)


def test_calls_beyond_the_most_are_left_out():
    text = WRITTEN["hermes"]([("add", {"a": 1}), ("note", {"a": 2})])
    message = heard(Speech(tools=PARSERS["hermes"](NAMES, most=1)), text)
    assert message.calls == [("add", '{"a": 1}')]


def test_a_key_that_is_too_long_fails_at_the_same_place_at_any_split():
    text = '<tool_call>{"' + "x" * 300 + '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    events = whole("hermes", text)
    assert CallBegin(0, "add") in events
    for cut in range(0, len(text), 7):
        assert in_pieces("hermes", text, [cut]) == events


def test_halves_of_surrogate_pairs_are_no_call():
    assert heard(Speech(tools=PARSERS["pythonic"](NAMES)), "[add(a='\\ud800')]").calls == []


def test_failed_calls_cost_no_more_than_their_length():
    text = '<tool_call>{"x": "' * 4000 + '"}'
    assert heard(Speech(tools=PARSERS["hermes"](NAMES)), text).content == text


def test_nesting_without_end_is_no_call_and_no_crash():
    for name, text in (
        ("hermes", '<tool_call>{"x": ' + "[" * 5000),
        ("hermes", "<tool_call>" + '{"function": ' * 5000),
        ("llama3", "<|python_tag|>" * 3000 + "x"),
        ("pythonic", "[add(a=" + "[" * 5000),
        ("pythonic", "[add(a=" + "-" * 5000 + "1)]"),
    ):
        assert heard(Speech(tools=PARSERS[name](NAMES)), text).calls == []


@pytest.mark.parametrize(
    ("sign", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("[TOOL_CALLS] <tool_call>", "mistral"),
        ("<｜tool▁calls▁begin｜>", "deepseek"),
        ("<|python_tag|>", "llama3"),
        ("<|python_start|>", "pythonic"),
        ("no tools at all", "hermes"),
        (None, "hermes"),
    ],
)
def test_the_template_says_which_parser(sign, name):
    assert parser_class("auto", sign) is PARSERS[name]
    assert parser_class("none", sign) is None
    assert parser_class("mistral", sign) is PARSERS["mistral"]


def test_the_setting_knows_every_parser():
    (setting,) = (s for s in config_settings() if s.name == "tool_call_parser")
    assert set(setting.choices) == {"auto", "none", *PARSERS}
