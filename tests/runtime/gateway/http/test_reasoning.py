"""Thinking is parted from the answer at any split, for every family of tags."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ramet.runtime.config import settings as config_settings
from ramet.runtime.gateway.http.reasoning import (
    FAMILIES,
    ReasoningParser,
    begins_inside,
    think_tags,
)

THINK = FAMILIES["qwen3"]


def parted(text, inside=False, cuts=(), tags=THINK):
    parser = ReasoningParser(tags, inside)
    edges = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    thought = answer = ""
    for start, end in itertools.pairwise(edges):
        more = parser.push(text[start:end])
        thought, answer = thought + more[0], answer + more[1]
    more = parser.finish()
    return thought + more[0], answer + more[1]


@pytest.mark.parametrize(
    ("text", "inside", "thought", "answer"),
    [
        ("<think>\nhm, a < b\n</think>\n\nYes.\n", False, "hm, a < b", "Yes.\n"),
        ("\n<think>x</think>y", False, "x", "y"),
        ("No thinking.", False, "", "No thinking."),
        (" <thin air", False, "", " <thin air"),
        ("\nhm</think>Yes", True, "hm", "Yes"),
        ("<think>hm</think>Yes", True, "hm", "Yes"),
        ("cut off </thi", True, "cut off </thi", ""),
        ("<think>\n\n</think>\n\nYes", False, "", "Yes"),
        ("<think>a</think>b</think>c<think>", False, "a", "b</think>c<think>"),
        ("<think>a \n\n b</think>", False, "a \n\n b", ""),
        ("a<think>b</think>", False, "", "a<think>b</think>"),
        (" \n", False, "", " \n"),
        ("", True, "", ""),
    ],
)
def test_thinking_and_answer(text, inside, thought, answer):
    assert parted(text, inside) == (thought, answer)
    assert parted(text, inside, range(len(text))) == (thought, answer)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", "<", "</", "think>", " ", "\n", "a", "bc", "é"]),
        max_size=12,
    ).map("".join),
    st.booleans(),
    st.lists(st.integers(0, 60), max_size=8),
)
def test_any_split_gives_the_same(text, inside, cuts):
    assert parted(text, inside, cuts) == parted(text, inside)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family(name):
    tags = think_tags(name, None)
    assert tags is not None
    text = f"{tags.start}because{tags.end}So."
    assert parted(text, begins_inside(tags, ""), tags=tags) == ("because", "So.")
    assert think_tags(name.replace("-", "_"), None) is tags


def test_what_the_prompt_ends_with_says_where_the_answer_begins():
    assert begins_inside(THINK, "<|assistant|><think>\n")
    assert not begins_inside(THINK, "<|assistant|>")
    assert not begins_inside(FAMILIES["deepseek-r1"], "<think>\n\n</think>\n\n")
    assert begins_inside(FAMILIES["deepseek-r1"], "<|assistant|>")


def test_the_template_says_which_tags():
    assert think_tags("auto", "{{ '<think>' }} {{ '</think>' }}") is THINK
    assert think_tags("auto", "◁think▷◁/think▷") is FAMILIES["kimi"]
    assert think_tags("auto", "plain") is None
    assert think_tags("auto", None) is None
    assert think_tags("none", "</think>") is None


def test_the_setting_knows_every_family():
    (setting,) = (s for s in config_settings() if s.name == "reasoning_parser")
    named = {choice.replace("_", "-") for choice in setting.choices}
    assert named == {"auto", "none", *FAMILIES}
