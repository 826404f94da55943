"""Streams of real generations: no stop string leaks, no character is torn, pieces join to the
whole."""

from __future__ import annotations

import random
from typing import Any

import pytest
import ramet as rt

GREEDY = {"temperature": 0.0, "max_new_tokens": 48}


def stops_in(text: str, count: int, seed: int) -> list[str]:
    """Pieces of a text, cut anywhere: inside of tokens and across them."""
    draws = random.Random(seed)
    found = []
    for _ in range(count):
        size = draws.choice([1, 2, 3, 5, 9, 17])
        at = draws.randrange(3, len(text) - size)
        found.append(text[at : at + size])
    return found


def streamed(runtime: Any, prompts: list[str], params: list[dict[str, Any]]) -> list[list[Any]]:
    """The items of each of several streams."""
    items: list[list[Any]] = [[] for _ in prompts]
    for item in runtime.generate(prompts, sampling_params=params, stream=True):
        items[item["index"]].append(item)
    return items


@pytest.mark.parametrize("which", ["chat1", "uni1", "uni3"])
def test_stop_strings_never_leak(runtime: Any, greedy_cases: Any, which: str) -> None:
    case = next(case for case in greedy_cases if case["id"] == which)
    whole = case["output_text"]
    stops = stops_in(whole, 15, seed=len(whole))
    params = [{**GREEDY, "stop": stop} for stop in stops] + [{**GREEDY, "stop": "\0never"}]
    want = [whole[: whole.index(stop)] for stop in stops] + [whole]
    prompts = [case["prompt"]] * len(params)
    table = runtime.tokenizer.token_bytes
    for items, text, stop in zip(streamed(runtime, prompts, params), want, [*stops, None]):
        shown = ""
        for item in items:
            assert item["text"].startswith(shown), "a stream took back what it had shown"
            shown = item["text"]
            assert text.startswith(shown), f"{shown!r} leaks of stop {stop!r}"
        assert shown == text
        last = items[-1]["meta_info"]
        if stop is None:
            assert last["finish_reason"] == {"type": "length"}
            continue
        assert last["finish_reason"] == {"type": "stop", "matched": stop}
        data = b"".join(table(token) for token in items[-1]["output_ids"])
        assert stop.encode() in data, "the tokens do not hold the stop"
        before = b"".join(table(token) for token in items[-1]["output_ids"][:-1])
        assert stop.encode() not in before, "it went on after the stop"


def test_stop_strings_without_a_stream(runtime: Any, greedy_cases: Any) -> None:
    case = greedy_cases[0]
    whole = case["output_text"]
    stops = stops_in(whole, 8, seed=2)
    pairs = list(zip(stops, reversed(stops)))
    replies = runtime.generate(
        [case["prompt"]] * 8, sampling_params=[{**GREEDY, "stop": list(pair)} for pair in pairs]
    )
    for pair, reply in zip(pairs, replies, strict=True):
        first = min(pair, key=lambda stop: (whole.index(stop) + len(stop), -len(stop)))
        assert reply["text"] == whole[: whole.index(first)]
        assert reply["meta_info"]["finish_reason"]["matched"] in pair


@rt.function
def story(s: Any, prompt: str, stop: str | None) -> None:
    s += prompt
    s += rt.gen("story", stop=stop, max_tokens=40)
    s += "\nIt is "
    s += rt.select("kind", ["true", "false"])
    with s.var_scope("end"):
        s += ". The end: " + rt.gen("last", max_tokens=5)


@pytest.mark.parametrize("which", [0, 9])
def test_streams_of_programs_join_to_the_whole(runtime: Any, greedy_cases: Any, which: int) -> None:
    case = greedy_cases[which]
    stop = case["output_text"][30:33]
    plain = story.run(case["prompt"], stop, backend=runtime, temperature=0.0)
    state = story.run(case["prompt"], stop, backend=runtime, temperature=0.0, stream=True)
    pieces = list(state.text_iter("story"))
    assert len(pieces) > 3, "it did not stream"
    assert "".join(pieces) == state["story"] == plain["story"]
    assert stop not in state["story"]
    assert "".join(state.text_iter()) == state.text() == plain.text()
    for name in ("story", "kind", "last", "end"):
        assert "".join(state.text_iter(name)) == state[name] == plain[name]
    by_variable: dict[str | None, str] = {}
    for event in state.events():
        assert event.path == ()
        by_variable[event.variable] = by_variable.get(event.variable, "") + event.delta
    assert by_variable["story"] == plain["story"]
    assert by_variable["last"] == plain["last"]
    assert not any("\ufffd" in piece for piece in pieces)


@rt.function
def branches(s: Any, prompts: list[str]) -> None:
    s += "Head. "
    forks = s.fork(len(prompts))
    for fork, prompt in zip(forks, prompts):
        fork += prompt
        fork += rt.gen("answer", max_tokens=10, return_logprob=True)
    forks.join("concate_and_append")
    s += " Tail."


def test_several_branches_stream_side_by_side(runtime: Any, greedy_cases: Any) -> None:
    prompts = [case["prompt"] for case in greedy_cases if case["category"] == "completion"]
    state = branches.run(prompts, backend=runtime, temperature=0.0, stream=True)
    order: list[tuple[int, ...]] = []
    texts: dict[tuple[int, ...], str] = {}
    for event in state.events():
        if event.variable == "answer":
            order.append(event.path)
            texts[event.path] = texts.get(event.path, "") + event.delta
    assert sorted(texts) == [(i,) for i in range(len(prompts))]
    first = [order.index((i,)) for i in range(len(prompts))]
    last = [len(order) - 1 - order[::-1].index((i,)) for i in range(len(prompts))]
    assert max(first) < min(last), "one branch streamed after the other"
    want = "Head. " + "".join(p + texts[i,] for i, p in enumerate(prompts)) + " Tail."
    assert state.text() == want


PARTY = "Emoji: " + "🎉" * 10
"""Goes on with more of them; each is three tokens, none of which is a character."""


@pytest.mark.parametrize("new", [12, 4, 5])
def test_a_torn_character_shows_only_at_a_length_cut(runtime: Any, new: int) -> None:
    params = {"temperature": 0.0, "max_new_tokens": new}
    items = list(runtime.generate(PARTY, sampling_params=params, stream=True))
    torn = new % 3 != 0
    assert items[-1]["text"] == "🎉" * (new // 3) + "\ufffd" * torn
    for item in items:
        assert "\ufffd" not in item["text"] or len(item["output_ids"]) == new
    assert runtime.generate(PARTY, sampling_params=params)["text"] == items[-1]["text"]


def test_a_torn_character_goes_on_in_the_next_generation(runtime: Any) -> None:
    """Its tokens stay as they are, whatever text shows meanwhile."""

    @rt.function
    def party(s: Any) -> None:
        s += PARTY
        s += rt.gen("a", max_tokens=4, return_logprob=True)
        s += rt.gen("b", max_tokens=5, return_logprob=True, logprob_start_len=0)

    state = party.run(backend=runtime, temperature=0.0, stream=True)
    one = runtime.generate(PARTY, sampling_params={"temperature": 0.0, "max_new_tokens": 9})
    entries = [e for n in "ab" for e in state.get_meta_info(n)["output_token_logprobs"]]
    assert [token for _, token, _ in entries] == one["output_ids"]
    prompt = [token for _, token, _ in state.get_meta_info("b")["input_token_logprobs"]]
    assert prompt == runtime.tokenizer.encode(PARTY) + one["output_ids"][:4]
    assert "".join(state.text_iter("a")) == state["a"]
    assert "".join(state.text_iter("b")) == state["b"]


def test_ids_and_log_probs_stream_too(runtime: Any, oracle: Any, greedy_cases: Any) -> None:
    case = greedy_cases[3]
    items = list(
        runtime.generate(
            case["prompt"], sampling_params=GREEDY, stream=True, return_logprob=True,
            logprob_start_len=0,
        )
    )  # fmt: skip
    sizes = [len(item["output_ids"]) for item in items]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) > 5
    for item in items:
        entries = item["meta_info"]["output_token_logprobs"]
        assert [token for _, token, _ in entries] == item["output_ids"]
        assert item["meta_info"]["completion_tokens"] == len(item["output_ids"])
    oracle.output(case, items[-1]["meta_info"])
    oracle.prompt(case, items[-1]["meta_info"])
    oracle.text(case, items[-1]["text"])


def test_an_abandoned_stream_is_aborted(runtime: Any, settled: Any) -> None:
    endless = {"max_new_tokens": 3000, "ignore_eos": True}
    stream = runtime.generate("Once", sampling_params=endless, stream=True)
    next(stream)
    stream.close()
    settled(runtime, 5)
    for _ in runtime.generate("Once", sampling_params=endless, stream=True):
        break
    settled(runtime, 5)


def test_stops_hold_back_no_more_than_they_must(runtime: Any, greedy_cases: Any) -> None:
    """With a stop that never comes, the stream still flows."""
    case = greedy_cases[3]
    params = {**GREEDY, "stop": ["\n\n\n\n", "colors!"]}
    items = list(runtime.generate(case["prompt"], sampling_params=params, stream=True))
    assert items[-1]["text"] == case["output_text"]
    assert len({item["text"] for item in items}) > 10
