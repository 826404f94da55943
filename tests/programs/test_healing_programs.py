"""Healing with the real model: a text that was cut anywhere goes on as it would have uncut."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import numpy as np
import pytest
import ramet as rt
from ramet.runtime.gateway.healing import Healer

GREEDY = {"temperature": 0.0, "heal": True}
CLEAR = CLOSE = 1e-3


@pytest.fixture(scope="module")
def healer(shared_runtime: Any) -> Healer:
    return Healer(shared_runtime.tokenizer)


def clear_from(case: dict[str, Any]) -> bool:
    return case["min_top1_top2_margin"] >= CLEAR


def cuts(case: dict[str, Any], tokenizer: Any, healer: Healer) -> list[tuple[str, int, int]]:
    """Where the text of a case may be cut in its answer: (text, output tokens that stay, tokens of
    the answer that hold a byte of what follows); only where the tokens before what is taken back
    are those that the model had."""
    prompt, output = case["prompt_token_ids"], case["output_token_ids"]
    data = tokenizer.decode(prompt, skip_special=False)
    found = []
    text = case["output_text"]
    for size in range(1, len(text)):
        cut = data + text[:size]
        ids = tokenizer.encode(cut)
        back = healer.take_back(np.array(ids, np.int32))
        kept = back.prompt.tolist()
        stay = len(kept) - len(prompt)
        if stay < 0 or kept != [*prompt, *output][: len(kept)]:
            continue
        held, whole = len(text[:size].encode()), 0
        before = 0
        while before < len(output) and whole + len(tokenizer.token_bytes(output[before])) <= held:
            whole += len(tokenizer.token_bytes(output[before]))
            before += 1
        found.append((cut, stay, before))
    return found


def test_a_text_cut_anywhere_goes_on_as_if_it_had_not_been(
    runtime: Any, greedy_cases: Any, healer: Healer
) -> None:
    """The token that the model would take is never masked: its bytes begin with those that are
    missing, or they with it. So what follows is the very same, log-probs included."""
    prompts, wants = [], []
    for case in filter(clear_from, greedy_cases):
        places = cuts(case, runtime.tokenizer, healer)
        assert len(places) > len(case["output_text"]) // 2
        for cut, _, before in places[::11]:
            prompts.append(cut)
            wants.append((case, len(cut), before))
    assert len(prompts) > 70
    params = [{**GREEDY, "max_new_tokens": 6, "ignore_eos": True} for _ in prompts]
    replies = runtime.generate(prompts, sampling_params=params, return_logprob=True)
    for reply, (case, size, before) in zip(replies, wants):
        output, logprobs = case["output_token_ids"], case["output_logprobs"]
        count = min(6, len(output) - before)
        assert reply["output_ids"][:count] == output[before : before + count], case["id"]
        got = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]][:count]
        assert got == pytest.approx(logprobs[before : before + count], abs=CLOSE)
        whole = runtime.tokenizer.decode(case["prompt_token_ids"], skip_special=False)
        rest = (whole + case["output_text"])[size:]
        shown = reply["text"]
        assert rest.startswith(shown) or shown.startswith(rest) or "\ufffd" in shown


def test_without_a_need_it_changes_nothing(runtime: Any, greedy_cases: Any) -> None:
    """Prompts that end at a special token have nothing to heal."""
    chats = [case for case in greedy_cases if case.get("messages")]
    assert chats
    for case in chats:
        ids = case["prompt_token_ids"]
        one, other = (
            runtime.generate(
                input_ids=ids, sampling_params={"temperature": 0, "max_new_tokens": 8, "heal": heal}
            )
            for heal in (True, False)
        )
        assert one["output_ids"] == other["output_ids"]


@pytest.mark.parametrize(
    ("prompt", "begin"),
    [
        ("The capital of Fra", "nce is Paris"),
        ("My homepage is at http:", "//"),
        ("def main():\n    ret", "urn"),
        ("The sky is blu", "e"),
        ("One, two, thr", "ee"),
    ],
)
def test_words_are_finished(runtime: Any, prompt: str, begin: str) -> None:
    reply = runtime.generate(prompt, sampling_params={**GREEDY, "max_new_tokens": 4})
    assert reply["text"].startswith(begin)
    plain = runtime.generate(prompt, sampling_params={"temperature": 0, "max_new_tokens": 4})
    assert reply["output_ids"] != plain["output_ids"]


def test_the_token_over_the_colon_can_come(runtime: Any) -> None:
    (token,) = runtime.tokenizer.encode("://")
    reply = runtime.generate(
        "My homepage is at http:", sampling_params={**GREEDY, "max_new_tokens": 1}
    )
    assert reply["output_ids"] == [token]
    assert reply["text"] == "//"


@rt.function
def capital(s: Any, **more: Any) -> None:
    s += rt.user("Which city is the capital of France?")
    s += rt.assistant("The capital of Fra" + rt.gen("x", max_tokens=8, heal=True, **more))


@pytest.mark.parametrize("compiled", [False, True])
def test_text_and_value_join_and_the_literal_is_there_once(runtime: Any, compiled: bool) -> None:
    @rt.function
    def program(s: Any) -> None:
        s += rt.user("Which city is the capital of France?")
        with s.assistant():
            s += "The capital of Fra"
            s += rt.gen("x", max_tokens=8, heal=True)
            s += " Bon" + rt.gen("y", max_tokens=3, heal=True)

    run = program.compile().run if compiled else program.run
    state = run(backend=runtime, temperature=0, return_logprob=True, logprob_start_len=0)
    x, y = state["x"], state["y"]
    assert x.startswith("nce is Paris")
    assert state.text().endswith(f"assistant\nThe capital of Fra{x} Bon{y}<|im_end|>\n")
    assert state.messages()[-1]["content"] == f"The capital of Fra{x} Bon{y}"
    first, second = state.get_meta_info("x"), state.get_meta_info("y")
    for name, meta in (("x", first), ("y", second)):
        ids = [token for _, token, _ in meta["output_token_logprobs"]]
        assert len(ids) == meta["completion_tokens"]
        assert runtime.tokenizer.decode(ids).endswith(state[name])
        assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
    # What the model wrote stays as it wrote it, and the spanning token stands in the prompt.
    prompt = [token for _, token, _ in second["input_token_logprobs"]]
    shown = runtime.tokenizer.decode(prompt)
    assert shown.endswith((f"The capital of Fra{x}", f"The capital of Fra{x} Bon"))
    assert runtime.tokenizer.encode(" France")[0] in prompt
    runtime.flush_cache()
    state = run(backend=runtime, temperature=0)
    begun = state.get_meta_info("x")["prompt_tokens"]
    assert state.get_meta_info("y")["cached_tokens"] >= begun


def test_pieces_join_to_the_value(runtime: Any) -> None:
    state = capital.run(backend=runtime, temperature=0, stream=True)
    pieces = list(state.text_iter("x"))
    assert "".join(pieces) == state["x"]
    assert state["x"].startswith("nce")
    assert "".join(state.text_iter()).endswith(f"The capital of Fra{state['x']}<|im_end|>\n")


def test_samples_and_temperature(runtime: Any) -> None:
    state = capital.run(backend=runtime, temperature=1.2, n=6, seed=3)
    assert len(set(state["x"])) > 1
    again = capital.run(backend=runtime, temperature=1.2, n=6, seed=3)
    assert again["x"] == state["x"]
    for _ in range(4):
        reply = runtime.generate(
            ["It is wor", "naïve 日本", "x = [1, 2,\n     "],
            sampling_params={"temperature": 1.5, "max_new_tokens": 5, "heal": True},
        )
        assert all(item["meta_info"]["completion_tokens"] <= 5 for item in reply)


def test_stops(runtime: Any) -> None:
    for stop, text in ((" is", "nce"), ("e", "nc"), ("n", ""), ("nce is", ""), ("Fra", None)):
        state = capital.run(backend=runtime, temperature=0, stop=stop)
        if text is None:
            assert state["x"].startswith("nce is Paris")
            continue
        assert state["x"] == text
        assert state.get_meta_info("x")["finish_reason"] == {"type": "stop", "matched": stop}
        assert state.messages()[-1]["content"] == "The capital of Fra" + text
    (token,) = runtime.tokenizer.encode(" France")
    state = capital.run(backend=runtime, temperature=0, stop_token_ids=[token])
    assert state["x"] == ""
    assert state.messages()[-1]["content"] == "The capital of Fra"


def test_max_tokens_are_tokens_of_the_value(runtime: Any) -> None:
    for count in (1, 2, 3):
        for prompt in ("The capital of Fra", "The capital of France", "The capital of "):
            reply = runtime.generate(prompt, sampling_params={**GREEDY, "max_new_tokens": count})
            assert len(reply["output_ids"]) == count
            assert reply["meta_info"]["completion_tokens"] == count
            assert reply["meta_info"]["finish_reason"]["type"] == "length"
    reply = runtime.generate("The capital of Fra", sampling_params={**GREEDY, "max_new_tokens": 0})
    assert reply["text"] == ""


# --- with a grammar -------------------------------------------------------------------------------


@pytest.mark.parametrize("jump", [True, False])
@pytest.mark.parametrize(
    ("prompt", "constraint", "pattern"),
    [
        ("The capital of Fra", {"regex": "nce|nk|y's|g[a-z]{2}"}, "nce|nk|y's|g[a-z]{2}"),
        ("I paid $1", {"regex": r"[0-9]{2}\.[0-9]{2}"}, r"[0-9]{2}\.[0-9]{2}"),
        ("The answer is", {"regex": " (yes|no)"}, " (yes|no)"),
        ("The answer is ", {"regex": "yes|no"}, "yes|no"),
        ("naïve caf", {"regex": "é(s|teria)?"}, "é(s|teria)?"),
        ("http:", {"regex": r"//[a-z]{1,5}\.(com|org)"}, r"//[a-z]{1,5}\.(com|org)"),
        ("A pair: ", {"ebnf": 'root ::= "(" [a-c] ", " [a-c] ")"'}, r"\([a-c], [a-c]\)"),
    ],
)
def test_a_constraint_begins_where_the_literal_ends(
    runtime: Any, prompt: str, constraint: Any, pattern: str, jump: bool
) -> None:
    for temperature in (0.0, 1.5):
        reply = runtime.generate(
            prompt,
            sampling_params={**GREEDY, **constraint, "temperature": temperature, "seed": 4,
                             "max_new_tokens": 24, "jump_forward": jump},
        )  # fmt: skip
        assert re.fullmatch(pattern, reply["text"]), reply["text"]
        assert reply["meta_info"]["finish_reason"]["type"] == "stop"


def test_jumping_and_a_mask_over_the_border_give_the_same(runtime: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Lyon"]}, "n": {"type": "integer"}},
        "required": ["city", "n"],
        "additionalProperties": False,
    }
    params = {**GREEDY, "json_schema": schema, "max_new_tokens": 40}
    for prompt in ("The JSON of the capital of France: ", "json =", "It is\n"):
        texts = {
            runtime.generate(prompt, sampling_params={**params, "jump_forward": jump})["text"]
            for jump in (True, False)
        }
        (text,) = texts
        value = json.loads(text) if text.endswith("}") else {"city": "Paris"}
        assert value["city"] in ("Paris", "Lyon")


def test_choices_and_types_of_programs(runtime: Any) -> None:
    @rt.function
    def typed(s: Any) -> None:
        s += "The capital of Fra" + rt.gen("a", choices=["nce", "nk"], constrained=True, heal=True)
        s += " has about" + rt.gen_int("b", heal=True, max_tokens=4)
        s += " people. It is" + rt.gen("c", regex=" (big|small)", heal=True)

    state = typed.run(backend=runtime, temperature=0)
    assert state["a"] == "nce"
    assert isinstance(state.value("b"), int)
    assert state["c"] in (" big", " small")


def test_many_at_once_are_as_if_alone(runtime: Any) -> None:
    prompts = ["The capital of Fra", "One, two, thr", "http:", "I am hap", "It was a dark and sto"]
    alone = [
        runtime.generate(prompt, sampling_params={**GREEDY, "max_new_tokens": 6})["output_ids"]
        for prompt in prompts
    ]

    async def together() -> list[Any]:
        jobs = [
            runtime.async_generate(p, sampling_params={**GREEDY, "max_new_tokens": 6})
            for p in prompts * 3
        ]
        return await asyncio.gather(*jobs)

    got = [reply["output_ids"] for reply in asyncio.run(together())]
    assert got == alone * 3
