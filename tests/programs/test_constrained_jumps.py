"""Greedy text is the same with forced tokens appended and with all sampled, of every backend."""

from __future__ import annotations

import json
from typing import Any

import pytest
import ramet as rt

REGEXES = [
    r"The answer is (yes|no)\.",
    r"(Monday|Tuesday|Wednesday|Thursday|Friday), [0-9]{1,2} (January|February|March) [0-9]{4}",
    r"[A-Z][a-z]{2,10} [A-Z][a-z]{2,10}",
    r"https://www\.example\.(com|org)/[a-z]{3,8}",
    r"name: [a-z]+; surname: [a-z]+; country of origin: (France|Finland|Fiji)",
    r"\([0-9]{3}\) [0-9]{3}-[0-9]{4}",
    r"(ab|abc|abcd)(e|de)f",
    r"(interesting|international|internet|internal) affairs",
    r"x{3}y{5}( the end| the ending| the endless)?!",
    r"é(té|cole|tude)s? à la (mode|carte)",
    r"[0-9]{2}:[0-9]{2}:[0-9]{2}\.000000Z",
    r"<(b|i)>[a-z ]{4,12}</(b|i)>",
    r"    return (True|False|None)\n",
    r"日本(語|人|酒)です。",
    r"-?[0-9]{1,3}(\.[0-9]{2})? (meters|metres) per second squared",
    r"SELECT (\*|id|name) FROM (users|orders) WHERE id = [0-9]{1,4};",
]
CHOICES = [
    ["positive", "negative", "neutral"],
    ["orderName", "orderId", "order"],
    ["a", "ab", "abc", "abcd"],
    ["I do not know", "I do", "I do not", "I don't"],
    ["北京", "北海道", "東京"],
    [" leading", "trailing ", " both "],
    ["New York", "New Jersey", "New Orleans", "Newark"],
    ["0", "1", "10", "100", "1000"],
]
GRAMMARS = [
    (
        'root ::= "Dear " name ",\\n\\nThank you for your " thing "."\n'
        'name ::= "Ada" | "Alan" | "Alonzo"\nthing ::= "letter" | "lettuce" | "let"'
    ),
    'root ::= "(" item ("," " " item){1,3} ")"\nitem ::= [a-z]{2,6}',
    (
        'root ::= "if " cond ":\\n    return " [a-z]{1,4}\n'
        'cond ::= "x > " [0-9]{1,2} | "not " cond | "x is None"'
    ),
    'root ::= "<html><body>" p{1,2} "</body></html>"\np ::= "<p>" [a-z ]{3,9} "</p>"',
    'root ::= expr\nexpr ::= "1" | "2" | "(" expr " plus " expr ")"',
    'start: "the " ("quick " | "quiet ")? "brown fox"',
]
TASKS: list[dict[str, Any]] = [
    *({"regex": regex} for regex in REGEXES),
    *({"constraint": {"kind": "choice", "spec": json.dumps(c)}} for c in CHOICES),
    *({"ebnf": grammar} for grammar in GRAMMARS),
]


def compare(runtime: Any, tasks: list[dict[str, Any]]) -> None:
    prompts = [f"Task {i}. Here it is: " for i in range(len(tasks))]
    params = [{"temperature": 0, "max_new_tokens": 40, **task} for task in tasks]
    jumped = runtime.generate(prompts, sampling_params=params)
    before = runtime.server_info()["forced_tokens"]
    plain = runtime.generate(
        prompts, sampling_params=[{**p, "jump_forward": False} for p in params]
    )
    assert runtime.server_info()["forced_tokens"] == before
    for task, one, other in zip(tasks, jumped, plain):
        assert one["text"] == other["text"], task
        assert one["output_ids"] == other["output_ids"], task
        assert one["meta_info"]["finish_reason"] == other["meta_info"]["finish_reason"], task


def test_jumps_change_no_text(runtime):
    before = runtime.server_info()["forced_tokens"]
    compare(runtime, TASKS)
    assert runtime.server_info()["forced_tokens"] > before + 60


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["llguidance", "outlines", "automaton"])
def test_jumps_change_no_text_of_a_pinned_backend(backend):
    tasks = TASKS if backend == "llguidance" else TASKS[: len(REGEXES) + len(CHOICES)]
    settings = {"dtype": "float32", "max_total_tokens": 8192, "grammar_backend": backend}
    with rt.Runtime("smollm2-135m-instruct", **settings) as runtime:
        compare(runtime, tasks)
        if backend != "llguidance":
            with pytest.raises(rt.GrammarError, match=backend):
                runtime.generate("x", sampling_params={"json_schema": {"type": "null"}})
