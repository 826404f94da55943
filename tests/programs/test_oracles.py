"""Greedy output in float32 is that of another engine, however the work is cut and shared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ramet as rt

GREEDY = {"temperature": 0.0, "max_new_tokens": 48}
ROOMY = {"max_total_tokens": 4096}
TIGHT = {"max_total_tokens": 448, "schedule_conservativeness": 0.01}
"""Admits far more than fits: whoever has done least is retracted, again and again."""

WAYS = {
    "chunk 32": {"chunked_prefill_size": 32, **ROOMY},
    "whole prompts": {"chunked_prefill_size": -1, **ROOMY},
    "retraction": {"chunked_prefill_size": -1, **TIGHT},
    "retraction, chunk 32, no cache": {
        "chunked_prefill_size": 32,
        "disable_radix_cache": True,
        **TIGHT,
    },
}
MORE_WAYS = {
    "no cache": {"disable_radix_cache": True, **ROOMY},
    "retraction, chunk 32": {"chunked_prefill_size": 32, **TIGHT},
    "retraction, no cache": {"chunked_prefill_size": -1, "disable_radix_cache": True, **TIGHT},
    "lfu": {"radix_eviction_policy": "lfu", "schedule_policy": "lpm", **TIGHT},
    "program": {"radix_eviction_policy": "program", "schedule_policy": "program", **TIGHT},
    "dfs, no overlap": {"schedule_policy": "dfs", "disable_overlap_schedule": True, **TIGHT},
}
PARAMS = [
    *(pytest.param(settings, id=name) for name, settings in WAYS.items()),
    *(pytest.param(s, id=name, marks=pytest.mark.slow) for name, s in MORE_WAYS.items()),
]


@pytest.fixture(scope="module", params=PARAMS)
def way(request: pytest.FixtureRequest) -> Iterator[Any]:
    with rt.Runtime(dtype="float32", **request.param) as runtime:
        runtime.settings = request.param
        yield runtime


def test_alone_cold_then_warm(case: dict[str, Any], cold: Any, oracle: Any) -> None:
    ask: dict[str, Any] = {"sampling_params": GREEDY, "return_logprob": True}
    first = cold.generate(case["prompt"], logprob_start_len=0, **ask)
    oracle.prompt(case, first["meta_info"])
    oracle.output(case, first["meta_info"])
    oracle.text(case, first["text"])
    assert first["output_ids"] == [t for _, t, _ in first["meta_info"]["output_token_logprobs"]]
    size = len(case["prompt_token_ids"])
    assert first["meta_info"]["cached_tokens"] == 0
    assert first["meta_info"]["prompt_tokens"] == size

    ask["sampling_params"] = {**GREEDY, "max_new_tokens": 24}
    warm = cold.generate(input_ids=case["prompt_token_ids"], **ask)
    oracle.output(case, warm["meta_info"], new=24)
    assert warm["meta_info"]["cached_tokens"] == size - 1

    scored = cold.generate(
        input_ids=case["prompt_token_ids"],
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=0,
    )
    oracle.prompt(case, scored["meta_info"])
    assert scored["output_ids"] == []


def test_what_follows_an_answer_finds_it_cached(cold: Any, oracle: Any, greedy_cases: Any) -> None:
    """An answer sent back as a prompt, cut in the middle, goes on as it did."""
    case = greedy_cases[0]
    cold.generate(input_ids=case["prompt_token_ids"], sampling_params=GREEDY)
    for cut in (1, 17, 47):
        ids = case["prompt_token_ids"] + case["output_token_ids"][:cut]
        again = cold.generate(
            input_ids=ids,
            sampling_params={"temperature": 0.0, "max_new_tokens": 48 - cut},
            return_logprob=True,
        )
        assert again["output_ids"] == case["output_token_ids"][cut:]
        values = [value for value, _, _ in again["meta_info"]["output_token_logprobs"]]
        assert values == pytest.approx(case["output_logprobs"][cut:], abs=1e-3)
        assert again["meta_info"]["cached_tokens"] == len(ids) - 1


@pytest.mark.parametrize("scoring", [True, False], ids=["scored", "plain"])
def test_batch_of_sixteen(cold: Any, oracle: Any, sixteen: Any, scoring: bool) -> None:
    batch_of_sixteen(cold, oracle, sixteen, scoring)


def test_batch_every_way(way: Any, oracle: Any, sixteen: Any, settled: Any) -> None:
    before = way.server_info()
    batch_of_sixteen(way, oracle, sixteen, scoring=True)
    middle = settled(way)
    batch_of_programs(way, oracle, sixteen)
    after = settled(way)
    if way.settings["max_total_tokens"] < 1000:
        assert middle["retracted"] > before["retracted"], "nothing was retracted"
    if way.settings.get("disable_radix_cache"):
        assert after["cache_hit_tokens"] == 0
        assert after["pages"]["cached"] == 0
    else:
        assert after["cache_hit_tokens"] > middle["cache_hit_tokens"]


def batch_of_sixteen(runtime: Any, oracle: Any, sixteen: Any, scoring: bool) -> None:
    replies = runtime.generate(
        [case["prompt"] for case in sixteen],
        sampling_params=GREEDY,
        return_logprob=True,
        logprob_start_len=0 if scoring else -1,
    )
    for case, reply in zip(sixteen, replies, strict=True):
        oracle.output(case, reply["meta_info"])
        oracle.text(case, reply["text"])
        if scoring:
            oracle.prompt(case, reply["meta_info"])


def test_alone_every_way(way: Any, oracle: Any, greedy_cases: Any) -> None:
    for case in greedy_cases[2], greedy_cases[9]:
        reply = way.generate(
            case["prompt"], sampling_params=GREEDY, return_logprob=True, logprob_start_len=0
        )
        oracle.output(case, reply["meta_info"])
        oracle.prompt(case, reply["meta_info"])


@rt.function
def completion(s: Any, prompt: str) -> None:
    s += prompt
    s += rt.gen("answer", return_logprob=True)


@rt.function
def in_two_pieces(s: Any, prompt: str) -> None:
    s += prompt
    s += rt.gen("first", max_tokens=11, return_logprob=True)
    s += rt.gen("second", max_tokens=13, return_logprob=True)


@rt.function
def chat(s: Any, messages: list[dict[str, str]]) -> None:
    for message in messages:
        s += getattr(rt, message["role"])(message["content"])
    s += rt.assistant(rt.gen("answer", return_logprob=True, logprob_start_len=0))


def test_programs_of_the_language(cold: Any, oracle: Any, sixteen: Any) -> None:
    batch_of_programs(cold, oracle, sixteen, logprob_start_len=0)


def batch_of_programs(runtime: Any, oracle: Any, sixteen: Any, **scoring: Any) -> None:
    states: Any = completion.run_batch(
        [{"prompt": case["prompt"]} for case in sixteen],
        backend=runtime,
        temperature=0.0,
        max_new_tokens=48,
        **scoring,
    )
    for case, state in zip(sixteen, states, strict=True):
        meta = state.get_meta_info("answer")
        oracle.output(case, meta)
        if scoring:
            oracle.prompt(case, meta)
        oracle.text(case, state["answer"])
        assert state.text() == case["prompt"] + state["answer"]


def test_one_generation_after_the_other_keeps_its_tokens(
    cold: Any, oracle: Any, greedy_cases: Any
) -> None:
    """Tokens that were generated are never cut anew: two generations in a row are one."""
    long = [case for case in greedy_cases if len(case["output_token_ids"]) >= 24]
    states = in_two_pieces.run_batch(
        [{"prompt": case["prompt"]} for case in long], backend=cold, temperature=0.0
    )
    for case, state in zip(long, states, strict=True):
        first, second = state.get_meta_info("first"), state.get_meta_info("second")
        entries = first["output_token_logprobs"] + second["output_token_logprobs"]
        oracle.ids(case, [token for _, token, _ in entries], 24)
        values = [value for value, _, _ in entries]
        assert values == pytest.approx(case["output_logprobs"][:24], abs=1e-3)
        assert second["cached_tokens"] == second["prompt_tokens"] - 1


def test_chats_by_roles(cold: Any, oracle: Any, greedy_cases: Any) -> None:
    """Role calls give exactly the prompt that the model's own template gives."""
    chats = [case for case in greedy_cases if case.get("messages")]
    assert chats
    states = chat.run_batch(
        [{"messages": case["messages"]} for case in chats],
        backend=cold,
        temperature=0.0,
        max_new_tokens=48,
    )
    for case, state in zip(chats, states, strict=True):
        meta = state.get_meta_info("answer")
        oracle.prompt(case, meta)
        oracle.output(case, meta)
        answer = {"role": "assistant", "content": case["output_text"]}
        assert state.messages()[-1] == answer
        assert state.text().startswith(case["prompt"] + case["output_text"])
