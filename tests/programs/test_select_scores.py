"""`select` on the real model: scores and winners are those of another engine."""

from __future__ import annotations

from typing import Any

import pytest
import ramet as rt

CLOSE = 1e-3


@rt.function
def pick(s: Any, prompt: str, choices: list[str], method: Any, boundary: Any = "plain") -> None:
    s += prompt
    s += rt.select("best", choices, choices_method=method, boundary=boundary)


def picked(runtime: Any, case: dict[str, Any], method: Any, boundary: Any = "plain") -> Any:
    choices = [choice["choice"] for choice in case["choices"]]
    return pick.run(case["prompt"], choices, method, boundary, backend=runtime)


def test_scores_and_the_winner_by_mean(cold: Any, select_case: dict[str, Any]) -> None:
    for _ in ("cold", "warm"):
        state = picked(cold, select_case, rt.token_length_normalized)
        meta = state.get_meta_info("best")
        assert meta["choices"] == [choice["choice"] for choice in select_case["choices"]]
        for want, entries, mean in zip(
            select_case["choices"],
            meta["input_token_logprobs"],
            meta["normalized_prompt_logprobs"],
            strict=True,
        ):
            assert [token for _, token, _ in entries] == want["token_ids"]
            values = [value for value, _, _ in entries]
            assert values == pytest.approx(want["token_logprobs"], abs=CLOSE)
            assert sum(values) == pytest.approx(want["sum_logprob"], abs=CLOSE)
            assert mean == pytest.approx(want["mean_logprob"], abs=CLOSE)
        assert state["best"] == select_case["best_by_mean"]
        assert state.text() == select_case["prompt"] + select_case["best_by_mean"]


def test_the_winner_by_greedy_token(runtime: Any, select_case: dict[str, Any]) -> None:
    state = picked(runtime, select_case, rt.greedy_token_selection)
    assert state["best"] == select_case["best_by_greedy_token"]


def test_unconditional_scores(runtime: Any, select_case: dict[str, Any]) -> None:
    state = picked(runtime, select_case, rt.unconditional_likelihood_normalized)
    meta = state.get_meta_info("best")
    scores = []
    for want, entries in zip(
        select_case["choices"], meta["unconditional_token_logprobs"], strict=True
    ):
        assert [token for _, token, _ in entries] == want["token_ids"]
        alone = want["unconditional_token_logprobs"]
        assert entries[0][0] is None
        assert alone[0] is None
        assert [value for value, _, _ in entries[1:]] == pytest.approx(alone[1:], abs=CLOSE)
        pairs = zip(want["token_logprobs"], alone)
        scores.append(sum(a - (b or 0.0) for a, b in pairs) / len(alone))
    assert meta["normalized_unconditional_prompt_logprobs"] == pytest.approx(scores, abs=CLOSE)
    best = max(range(len(scores)), key=scores.__getitem__)
    assert state["best"] == select_case["choices"][best]["choice"]


def test_exact_boundary_equals_plain_where_tokens_do(
    runtime: Any, select_case: dict[str, Any]
) -> None:
    choices = select_case["choices"]
    assert all(choice["joint_tokenization_identical"] for choice in choices)
    state = picked(runtime, select_case, rt.token_length_normalized, "exact")
    meta = state.get_meta_info("best")
    want = [choice["mean_logprob"] for choice in choices]
    # Scored from where the choices part, the mean still counts what holds a byte of the choice.
    assert meta["normalized_prompt_logprobs"] == pytest.approx(want, abs=CLOSE)
    assert state["best"] == select_case["best_by_mean"]


def test_exact_boundary_scores_a_prompt_that_ends_in_a_space(runtime: Any) -> None:
    """The blank belongs to the choice's first token: scoring begins before it."""
    choices = ["Paris", "London", "Berlin"]
    with_space = pick.run(
        "The capital of France is ", choices, rt.token_length_normalized, "exact", backend=runtime
    )
    before = [f" {choice}" for choice in choices]
    without = pick.run(
        "The capital of France is", before, rt.token_length_normalized, "plain", backend=runtime
    )
    first, second = (s.get_meta_info("best") for s in (with_space, without))
    for one, other in zip(first["input_token_logprobs"], second["input_token_logprobs"]):
        assert [t for _, t, _ in one] == [t for _, t, _ in other]
        assert [v for v, _, _ in one] == pytest.approx([v for v, _, _ in other], abs=CLOSE)
    assert with_space["best"] == "Paris"
    assert with_space.text() == "The capital of France is Paris"


def test_what_follows_a_select_goes_on_from_the_winner(cold: Any) -> None:
    """Text after a choice is cut as if the choice had stood in the prompt from the start."""

    @rt.function
    def program(s: Any) -> None:
        s += "The capital of France is"
        s += rt.select("city", [" Paris", " London"])
        s += ". It is"
        s += rt.gen("more", max_tokens=8, return_logprob=True, logprob_start_len=0)

    state = program.run(backend=cold, temperature=0.0)
    meta = state.get_meta_info("more")
    ids = [token for _, token, _ in meta["input_token_logprobs"]]
    assert ids == cold.tokenizer.encode("The capital of France is Paris. It is")
    plain = cold.generate(
        "The capital of France is Paris. It is",
        sampling_params={"temperature": 0.0, "max_new_tokens": 8},
    )
    assert state["more"] == plain["text"]


def test_the_context_is_computed_once_for_all_choices(cold: Any, settled: Any) -> None:
    prompt = "A long time ago, in a land far away, " * 20
    choices = [f" number {i}" for i in range(8)]
    before = cold.server_info()["computed_tokens"]
    pick.run(prompt, choices, rt.token_length_normalized, backend=cold)
    computed = settled(cold)["computed_tokens"] - before
    size = len(cold.tokenizer.encode(prompt))
    extra = sum(len(cold.tokenizer.encode(choice)) + 1 for choice in choices)
    assert computed <= size + extra
