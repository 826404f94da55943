"""Programs whose values are constrained, on the real model, from the language and without it."""

from __future__ import annotations

import enum
import itertools
import re
import threading
import time
from typing import Literal, TypedDict

import pydantic
import pytest
import ramet as rt


class Mood(enum.Enum):
    GLAD = "glad"
    SAD = "sad"


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    people: int = pydantic.Field(ge=0, le=99_999_999)


class Line(TypedDict):
    start: tuple[int, int]
    dotted: bool


def test_values_come_back_as_what_they_were_asked_to_be(runtime):
    @rt.function
    def ask(s):
        s += rt.user("Tell me about Paris.")
        s += rt.assistant(
            "Founded in "
            + rt.gen("year", dtype=int, max_tokens=8)
            + " height "
            + rt.gen("height", dtype=float, max_tokens=8)
            + " capital: "
            + rt.gen("capital", dtype=bool)
            + " mood: "
            + rt.gen("mood", dtype=Mood)
            + " answer: "
            + rt.gen("answer", dtype=Literal["yes", "no", "maybe"])
            + " color: "
            + rt.gen("color", choices=["red", "green"], constrained=True)
            + " code: "
            + rt.gen("code", regex=r"[A-Z]{2}-[0-9]{3}")
            + "\n"
            + rt.gen("city", json_schema=City, max_tokens=60)
            + "\n"
            + rt.gen("line", json_schema=Line, max_tokens=60, regex=None)
            + "\n"
            + rt.gen("sum", grammar='root ::= num ("+" num)+\nnum ::= [0-9] [0-9]', max_tokens=20)
        )

    state = ask.run(backend=runtime, temperature=0)
    assert isinstance(state.value("year"), int)
    assert isinstance(state.value("height"), float)
    assert state.value("capital") in (True, False)
    assert state.value("mood") in Mood
    assert state.value("answer") in ("yes", "no", "maybe")
    assert state["color"] in ("red", "green")
    assert re.fullmatch(r"[A-Z]{2}-[0-9]{3}", state["code"])
    assert isinstance(state.value("city"), City)
    assert state.value("city") == City.model_validate_json(state["city"])
    line = state.value("line")
    assert set(line) == {"start", "dotted"}
    assert isinstance(line["start"], (tuple, list))
    assert re.match(r"[0-9]{2}\+[0-9]", state["sum"])
    assert f"color: {state['color']} code: {state['code']}\n{state['city']}\n" in state.text()


def test_branches_and_samples_have_matchers_of_their_own(runtime):
    @rt.function
    def ask(s):
        s += "Numbers: "
        s += rt.gen("first", regex=r"[0-9]{3}(,[0-9]{3}){2}")
        for i, branch in enumerate(s.fork(4)):
            branch += f" and {i}: " + rt.gen("more", regex=r"[0-9]{2}(;[0-9]{2}){3}")
        s += rt.gen("many", regex=r" [a-z]{3,9}!", n=8, temperature=1.0)
        s["forks"] = ""

    state = ask.run(backend=runtime, temperature=0.8, max_new_tokens=40)
    assert re.fullmatch(r"[0-9]{3}(,[0-9]{3}){2}", state["first"])
    many = state["many"]
    assert len(many) == 8
    assert all(re.fullmatch(r" [a-z]{3,9}!", text) for text in many)
    assert len(set(many)) > 1


def test_joined_branches_are_typed(runtime):
    @rt.function
    def ask(s):
        branches = s.fork(3)
        for branch in branches:
            branch += "A digit: " + rt.gen("digit", regex="[0-9]")
            branch += " A city: " + rt.gen("city", json_schema=City, max_tokens=60)
        branches.join()

    state = ask.run(backend=runtime, temperature=0)
    assert all(re.fullmatch("[0-9]", text) for text in state["digit"])
    assert all(isinstance(city, City) for city in state.value("city"))


def test_compiled_programs_constrain_too(runtime):
    @rt.function
    def ask(s, what):
        s += f"{what} in JSON: " + rt.gen("city", json_schema=City, max_tokens=60)
        s += " years: " + rt.gen("years", dtype=int, max_tokens=6)

    compiled = ask.compile()
    lazy = ask.run(what="Rome", backend=runtime, temperature=0)
    state = compiled.run(what="Rome", backend=runtime, temperature=0)
    assert state["city"] == lazy["city"]
    assert state.value("city") == lazy.value("city")
    assert state.value("years") == lazy.value("years")


MIXED = [
    {},
    {"regex": r"[A-Z][a-z]+( [A-Z][a-z]+)*\."},
    {"json_schema": City.model_json_schema()},
    {"ebnf": 'root ::= "(" item ("," item)* ")"\nitem ::= [a-z]+ | root'},
    {"regex": r"[0-9]{3}-[0-9]{4}"},
    {},
    {"json_schema": {"type": "array", "items": {"enum": ["left", "right"]}, "maxItems": 6}},
]


@pytest.mark.parametrize("jump", [True, False])
def test_each_row_of_a_mixed_batch_is_its_own_single_run(runtime, jump):
    params = [
        {"temperature": 0, "max_new_tokens": 24, "jump_forward": jump, **more} for more in MIXED
    ]
    prompts = ["The list of names is: "] * len(params)
    alone = [runtime.generate(p, sampling_params=q) for p, q in zip(prompts, params)]
    together = runtime.generate(prompts, sampling_params=params)
    for one, other in zip(alone, together):
        assert one["output_ids"] == other["output_ids"]
        assert one["text"] == other["text"]
    free = runtime.generate(prompts[0], sampling_params={"temperature": 0, "max_new_tokens": 24})
    assert together[0]["output_ids"] == together[5]["output_ids"] == free["output_ids"]


def test_log_probs_of_constrained_tokens_are_those_of_the_raw_logits(runtime):
    params = {"regex": "[0-9]{4}", "temperature": 0, "max_new_tokens": 16}
    out = runtime.generate("It was in ", sampling_params=params, return_logprob=True)
    entries = out["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in entries] == out["output_ids"]
    assert all(value is not None and value <= 0 for value, _, _ in entries)
    text = runtime.tokenizer.encode("It was in ")
    scored = runtime.generate(
        input_ids=[*text, *out["output_ids"]],
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=len(text),
    )
    want = [value for value, _, _ in scored["meta_info"]["input_token_logprobs"]]
    assert [value for value, _, _ in entries] == pytest.approx(want, abs=1e-3)


def test_streams_of_constrained_text_join_to_it(runtime):
    params = {"json_schema": City.model_json_schema(), "temperature": 0, "max_new_tokens": 60}
    whole = runtime.generate("JSON: ", sampling_params=params)["text"]
    pieces = [p["text"] for p in runtime.generate("JSON: ", sampling_params=params, stream=True)]
    assert all(after.startswith(before) for before, after in itertools.pairwise(pieces))
    assert pieces[-1] == whole


def test_stop_strings_cut_constrained_text(runtime):
    params = {"regex": "[a-z]{4}:[0-9]{4}:[a-z]{4}", "temperature": 0, "max_new_tokens": 40}
    whole = runtime.generate("Code: ", sampling_params=params)["text"]
    for jump in (True, False):
        out = runtime.generate(
            "Code: ", sampling_params={**params, "stop": [":"], "jump_forward": jump}
        )
        assert out["text"] == whole[:4]
        assert out["meta_info"]["finish_reason"] == {"type": "stop", "matched": ":"}


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"regex": "a(?=b)"}, ("look-ahead", "character 1")),
        ({"json_schema": "{"}, ("JSON",)),
        ({"json_schema": {"type": "strin"}}, ("strin",)),
        ({"ebnf": 'root ::= "a" missing'}, ("missing",)),
    ],
)
def test_what_cannot_be_kept_to_is_a_grammar_error(runtime, params, words):
    with pytest.raises(rt.GrammarError) as caught:
        runtime.generate("x", sampling_params={"max_new_tokens": 8, **params})
    for word in words:
        assert word in str(caught.value)


def test_the_line_is_named_where_a_constraint_cannot_be_compiled(runtime):
    @rt.function
    def ask(s):
        s += "x" + rt.gen("a", grammar='root ::= "a" missing')

    state = ask.run(backend=runtime)
    with pytest.raises(rt.GrammarError, match=r"missing.*test_constrained_programs\.py"):
        state["a"]


def test_an_abort_while_the_grammar_is_compiled(runtime):
    """A pattern that takes its time, and nobody who waits for it in the end."""
    slow = "|".join(f"[a-{chr(98 + i)}]{{{i},{90 + i}}}x" for i in range(12))
    errors = []

    def ask():
        try:
            params = {"regex": slow, "max_new_tokens": 4}
            runtime.generate("x", sampling_params=params, rid="slow-one")
        except rt.RametError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.1)
    runtime.abort("slow-one")
    thread.join(20)
    assert not thread.is_alive()
    assert len(errors) <= 1


def test_retracted_requests_go_on_in_their_grammar():
    """KV for not even two of them to the end, computed together and alone."""
    params = {"regex": r"([a-z]{2,9} ){12}end", "temperature": 0, "max_new_tokens": 48}
    prompts = [f"{word} and so on: " for word in ("one", "two", "three")]
    with rt.Runtime("smollm2-135m-instruct", dtype="float32", max_total_tokens=96) as small:
        alone = [small.generate(prompt, sampling_params=params)["text"] for prompt in prompts]
        small.flush_cache()
        together = [out["text"] for out in small.generate(prompts, sampling_params=params)]
        assert small.server_info()["retracted"] > 0
    assert together == alone
