"""What sampling parameters do to real output: seeds, samples, temperatures, penalties, ends."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import ramet as rt

PARIS = "The capital of France is"
SAMPLES = 256
GREEDY = {"temperature": 0.0, "max_new_tokens": 24}


def first_tokens(runtime: Any, **sampling: Any) -> Counter[int]:
    """The first token of `SAMPLES` answers."""
    params = {"max_new_tokens": 1, "n": SAMPLES, "seed": 11, **sampling}
    replies = runtime.generate(PARIS, sampling_params=params)
    assert len(replies) == SAMPLES
    return Counter(reply["output_ids"][0] for reply in replies)


@pytest.fixture(scope="module")
def top(shared_runtime: Any) -> list[tuple[float, int]]:
    """The 100 likeliest next tokens and their log-probs, of raw logits."""
    reply = shared_runtime.generate(
        PARIS,
        sampling_params={"max_new_tokens": 1, "temperature": 0.0},
        return_logprob=True,
        top_logprobs_num=100,
    )
    (entries,) = reply["meta_info"]["output_top_logprobs"]
    return [(value, token) for value, token, _ in entries]


def near(count: int, probability: float) -> None:
    """Within 4.5 standard deviations of a binomial's mean."""
    deviation = math.sqrt(SAMPLES * probability * (1 - probability))
    assert abs(count - SAMPLES * probability) <= 4.5 * deviation + 1


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.5])
def test_draws_follow_the_distribution(
    runtime: Any, top: list[tuple[float, int]], temperature: float
) -> None:
    counts = first_tokens(runtime, temperature=temperature, top_k=100)
    weights = {token: math.exp(value / temperature) for value, token in top}
    total = sum(weights.values())
    for _, token in top[:5]:
        near(counts[token], weights[token] / total)
    assert set(counts) <= set(weights), "top_k let more through"


def test_what_is_cut_off_is_never_drawn(runtime: Any, top: list[tuple[float, int]]) -> None:
    best, second, third = (token for _, token in top[:3])

    def drawn(**sampling: Any) -> set[int]:
        params = {"max_new_tokens": 1, "n": 40, "seed": 4, **sampling}
        replies = runtime.generate(PARIS, sampling_params=params)
        return {reply["output_ids"][0] for reply in replies}

    assert drawn(top_p=0.5) == {best}
    assert drawn(min_p=0.9) == {best}
    assert drawn(top_k=1, temperature=2.0) == {best}
    assert drawn(temperature=0.0) == {best}
    assert drawn(top_k=2, temperature=2.0) == {best, second}
    assert drawn(logit_bias={best: -100.0}, top_k=2, temperature=2.0) == {second, third}
    assert len(drawn(temperature=2.0)) > 10


def test_top_log_probs(runtime: Any, top: list[tuple[float, int]]) -> None:
    values = [value for value, _ in top]
    assert values == sorted(values, reverse=True)
    assert len({token for _, token in top}) == 100
    assert sum(math.exp(value) for value in values) <= 1 + 1e-4
    reply = runtime.generate(
        PARIS, sampling_params=GREEDY, return_logprob=True, logprob_start_len=0, top_logprobs_num=3
    )
    meta = reply["meta_info"]
    assert len(meta["output_top_logprobs"]) == 24
    for entries, (value, token, text) in zip(
        meta["output_top_logprobs"], meta["output_token_logprobs"]
    ):
        assert len(entries) == 3
        assert entries[0] == pytest.approx((value, token, text))
    assert len(meta["input_top_logprobs"]) == len(meta["input_token_logprobs"]) == 5
    assert meta["input_top_logprobs"][0] is None


def test_log_probs_are_of_the_raw_logits(runtime: Any, top: list[tuple[float, int]]) -> None:
    """Neither temperature nor bias nor penalties show in them."""
    best, value = top[3][1], top[3][0]
    reply = runtime.generate(
        PARIS,
        sampling_params={
            "max_new_tokens": 1,
            "temperature": 0.3,
            "logit_bias": {best: 80.0},
            "repetition_penalty": 1.5,
        },
        return_logprob=True,
    )
    ((got, token, _),) = reply["meta_info"]["output_token_logprobs"]
    assert token == best
    assert got == pytest.approx(value, abs=1e-3)


def test_seeds_reproduce(runtime: Any) -> None:
    params = {"temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True}
    ask = {"sampling_params": {**params, "seed": 5}}
    first = runtime.generate(PARIS, **ask)["output_ids"]
    assert runtime.generate(PARIS, **ask)["output_ids"] == first
    runtime.flush_cache()
    assert runtime.generate(PARIS, **ask)["output_ids"] == first
    mixed = runtime.generate(
        [PARIS, "Two plus two", PARIS, PARIS],
        sampling_params=[{**params, "seed": seed} for seed in (7, 5, 5, 6)],
    )
    assert mixed[2]["output_ids"] == first, "others in the batch change the draws"
    assert len({tuple(reply["output_ids"]) for reply in mixed}) == 4
    free = [runtime.generate(PARIS, sampling_params=params)["output_ids"] for _ in range(3)]
    assert len({tuple(ids) for ids in free}) > 1, "without a seed all draws are the same"


def test_a_retracted_request_draws_on_as_it_would_have(runtime: Any) -> None:
    prompts = [f"{PARIS} {i}" for i in range(6)]
    params = [
        {"max_new_tokens": 16, "seed": seed, "ignore_eos": True, "frequency_penalty": 0.5}
        for seed in range(6)
    ]
    with rt.Runtime(
        dtype="float32", max_total_tokens=80, schedule_conservativeness=0.01
    ) as crowded:
        tight = crowded.generate(prompts, sampling_params=params)
        assert crowded.server_info()["retracted"] > 0
    roomy = runtime.generate(prompts, sampling_params=params)
    assert [r["output_ids"] for r in tight] == [r["output_ids"] for r in roomy]


def test_samples_of_one_prompt(runtime: Any, settled: Any) -> None:
    params = {"n": 4, "seed": 3, "temperature": 1.0, "max_new_tokens": 12}
    before = settled(runtime)["computed_tokens"]
    prompt = "Once upon a time there lived an old king who had " * 4
    replies = runtime.generate(prompt, sampling_params=params)
    computed = settled(runtime)["computed_tokens"] - before
    size = len(runtime.tokenizer.encode(prompt))
    assert computed < size + 4 * 14, "the prompt was computed more than once"
    outputs = [tuple(reply["output_ids"]) for reply in replies]
    assert len(set(outputs)) == 4
    again = runtime.generate(prompt, sampling_params=params)
    assert [tuple(reply["output_ids"]) for reply in again] == outputs
    many = runtime.generate([prompt, PARIS], sampling_params={**params, "n": 2})
    assert len(many) == 4
    assert tuple(many[0]["output_ids"]) == outputs[0]


def test_samples_in_a_program(runtime: Any) -> None:
    @rt.function
    def votes(s: Any) -> None:
        s += PARIS
        s += rt.gen("city", n=3, temperature=1.0, seed=2, max_tokens=6)
        s += "|"

    state = votes.run(backend=runtime)
    assert len(state["city"]) == 3
    assert len(set(state["city"])) == 3
    assert [meta["finish_reason"]["type"] for meta in state.get_meta_info("city")]
    assert state.text() == PARIS + state["city"][0] + "|"


def test_penalties_make_repetition_rarer(runtime: Any) -> None:
    """The model repeats itself by nature; each penalty makes it stop."""
    prompt = "na na na na na na na na"

    def answer(**penalty: float) -> list[int]:
        params = {**GREEDY, "ignore_eos": True, **penalty}
        return runtime.generate(prompt, sampling_params=params)["output_ids"]

    plain = max(Counter(answer()).values())
    assert plain >= 10
    assert max(Counter(answer(frequency_penalty=2.0)).values()) < plain / 2
    assert len(set(answer(presence_penalty=2.0))) > len(set(answer()))
    assert max(Counter(answer(repetition_penalty=1.8)).values()) < plain / 2
    assert answer(frequency_penalty=0.0, presence_penalty=0.0) == answer()


def test_logit_bias(runtime: Any, greedy_cases: Any) -> None:
    case = greedy_cases[0]
    banned = case["output_token_ids"][0]
    params = {**GREEDY, "logit_bias": {banned: -100.0}}
    assert banned not in runtime.generate(case["prompt"], sampling_params=params)["output_ids"]
    params = {**GREEDY, "max_new_tokens": 5, "logit_bias": {42: 100.0}}
    assert runtime.generate(case["prompt"], sampling_params=params)["output_ids"] == [42] * 5


@pytest.fixture(scope="module")
def short(greedy_cases: Any) -> dict[str, Any]:
    """A case that ends by itself."""
    return next(case for case in greedy_cases if case["finish_reason"] == "stop")


def test_it_stops_by_itself(runtime: Any, short: dict[str, Any]) -> None:
    reply = runtime.generate(short["prompt"], sampling_params=GREEDY)
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
    assert reply["output_ids"] == short["output_token_ids"]
    assert reply["output_ids"][-1] == 2
    assert reply["text"] == short["output_text"]


def test_ignore_eos_goes_on(runtime: Any, short: dict[str, Any]) -> None:
    reply = runtime.generate(short["prompt"], sampling_params={**GREEDY, "ignore_eos": True})
    assert reply["output_ids"][: len(short["output_token_ids"])] == short["output_token_ids"]
    assert len(reply["output_ids"]) == 24
    assert reply["meta_info"]["finish_reason"] == {"type": "length"}
    assert "<|im_end|>" not in reply["text"]


def test_min_tokens_puts_the_end_off(runtime: Any, short: dict[str, Any]) -> None:
    size = len(short["output_token_ids"])
    params = {**GREEDY, "min_new_tokens": size + 4}
    reply = runtime.generate(short["prompt"], sampling_params=params)
    assert reply["meta_info"]["completion_tokens"] >= size + 4
    assert reply["output_ids"][: size - 1] == short["output_token_ids"][:-1]
    assert 2 not in reply["output_ids"][: size + 4]


def test_min_tokens_puts_stop_strings_off(runtime: Any, greedy_cases: Any) -> None:
    case = next(case for case in greedy_cases if case["id"] == "comp5")
    whole, stop = case["output_text"], ","
    assert whole.count(stop) >= 2
    for stream in (False, True):
        params = {**GREEDY, "max_new_tokens": 48, "stop": stop, "min_new_tokens": 24}
        reply = runtime.generate(case["prompt"], sampling_params=params, stream=stream)
        reply = list(reply)[-1] if stream else reply
        assert whole.startswith(reply["text"])
        assert reply["meta_info"]["completion_tokens"] > 24
        assert len(reply["text"]) > whole.index(stop)


def test_stop_token_ids(runtime: Any, greedy_cases: Any) -> None:
    case = greedy_cases[0]
    stop = case["output_token_ids"][10]
    at = case["output_token_ids"].index(stop)
    params = {**GREEDY, "stop_token_ids": [stop, 17]}
    reply = runtime.generate(case["prompt"], sampling_params=params, return_logprob=True)
    assert reply["output_ids"] == case["output_token_ids"][: at + 1]
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert reply["text"] == runtime.tokenizer.decode(case["output_token_ids"][:at])
    assert len(reply["meta_info"]["output_token_logprobs"]) == at + 1


def test_finish_reasons(runtime: Any, greedy_cases: Any) -> None:
    case = greedy_cases[0]
    stop = case["output_text"][20:24]

    @rt.function
    def ends(s: Any) -> None:
        s += case["prompt"]
        length, string, token = s.fork(3)
        length += rt.gen("x", max_tokens=5)
        string += rt.gen("x", max_tokens=48, stop=stop)
        token += rt.gen("x", max_tokens=48, stop_token_ids=[case["output_token_ids"][6]])
        s["reasons"] = [b.get_meta_info("x")["finish_reason"] for b in (length, string, token)]

    assert ends.run(backend=runtime, temperature=0.0)["reasons"] == [
        {"type": "length"},
        {"type": "stop", "matched": stop},
        {"type": "stop", "matched": case["output_token_ids"][6]},
    ]


def test_defaults_of_a_run_and_what_a_gen_overrides(runtime: Any) -> None:
    @rt.function
    def defaults(s: Any) -> None:
        s += PARIS
        s += rt.gen("a")
        s += rt.gen("b", max_tokens=2)

    state = defaults.run(backend=runtime, temperature=0.0, max_new_tokens=5, ignore_eos=True)
    assert state.get_meta_info("a")["completion_tokens"] == 5
    assert state.get_meta_info("b")["completion_tokens"] == 2
