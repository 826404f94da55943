"""Rows that ask for different things in one batch, and what a draw may depend on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ramet.kernels.operands import Masks
from ramet.kernels.ops import ops_for
from ramet.runtime.model.sampler import Sampler
from ramet.runtime.protocol.messages import EngineSampling

VOCAB = 67
NONE = np.zeros(0, np.int32)


def sampler(rows: int = 8) -> Sampler:
    return Sampler(ops_for("cpu"), rows, VOCAB)


def ask(**values: Any) -> EngineSampling:
    return EngineSampling(max_new_tokens=9, **values)


def logits_of(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def take(s: Sampler, logits: torch.Tensor, rows: list[int], steps: list[int], **more: Any) -> Any:
    return s.sample(logits.clone(), np.array(rows, np.int32), np.array(steps, np.int32), **more)


asks = st.builds(
    ask,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    top_k=st.sampled_from([-1, 1, 4, 50]),
    top_p=st.sampled_from([1.0, 0.8, 0.3]),
    min_p=st.sampled_from([0.0, 0.2]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    presence_penalty=st.sampled_from([0.0, -0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    seed=st.integers(-(2**63), 2**63 - 1),
    bias_ids=st.just((3, 9)),
    bias_values=st.sampled_from([(0.0, 0.0), (5.0, -5.0)]),
    min_new_tokens=st.sampled_from([0, 3]),
    stop_ids=st.just((1, 2)),
)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    wanted=asks,
    others=st.lists(asks, max_size=5),
    place=st.integers(0, 5),
    seed=st.integers(0, 10_000),
    steps=st.integers(1, 4),
)
def test_a_row_does_not_depend_on_its_neighbours(
    wanted: EngineSampling, others: list[EngineSampling], place: int, seed: int, steps: int
) -> None:
    prompt = np.array([4, 5, 4, 1], np.int32)
    alone, crowd = sampler(), sampler()
    alone.set_row(0, wanted, prompt, NONE)
    place = min(place, len(others))
    everyone = [*others[:place], wanted, *others[place:]]
    for row, sampling in enumerate(everyone):
        crowd.set_row(row, sampling, prompt, NONE)
    for step in range(steps):
        own = logits_of(seed + step)
        mixed = logits_of(seed + 77 + step, len(everyone))
        mixed[place] = own[0]
        one = take(alone, own, [0], [step], logprobs=True)
        rows = list(range(len(everyone)))
        many = take(crowd, mixed, rows, [step] * len(rows), logprobs=True)
        assert one.ids[0] == many.ids[place]
        assert one.logprobs[0] == pytest.approx(many.logprobs[place].item(), abs=1e-6)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(wanted=asks, seed=st.integers(0, 10_000), step=st.integers(0, 1000))
def test_a_draw_is_a_function_of_seed_step_and_logits(
    wanted: EngineSampling, seed: int, step: int
) -> None:
    first, second = sampler(), sampler()
    first.set_row(5, ask(temperature=1.0, seed=1), NONE, NONE)
    for s, row in ((first, 5), (second, 2)):
        s.set_row(row, wanted, NONE, NONE)
    logits = logits_of(seed)
    assert take(first, logits, [5], [step]).ids == take(second, logits, [2], [step]).ids


def test_seeds_and_steps_change_draws() -> None:
    s = sampler()
    logits = torch.zeros(1, VOCAB)
    s.set_row(0, ask(temperature=1.0, seed=4), NONE, NONE)
    by_step = {int(take(s, logits, [0], [step]).ids) for step in range(50)}
    by_seed = set()
    for seed in range(50):
        s.set_row(0, ask(temperature=1.0, seed=seed), NONE, NONE)
        by_seed.add(int(take(s, logits, [0], [0]).ids))
    assert len(by_step) > 20
    assert len(by_seed) > 20


@settings(max_examples=50, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), temperature=st.sampled_from([0.3, 1.0, 5.0]))
def test_top_k_of_one_is_greedy(seed: int, temperature: float) -> None:
    s = sampler()
    s.set_row(0, ask(temperature=temperature, top_k=1, seed=seed), NONE, NONE)
    logits = logits_of(seed)
    assert int(take(s, logits, [0], [0]).ids) == int(logits.argmax())


def test_penalties_count_prompt_and_output() -> None:
    """The same numbers as a plain loop, over several samples and from a prior output."""
    s = sampler()
    wanted = ask(repetition_penalty=1.4, frequency_penalty=0.6, presence_penalty=0.3)
    prompt, output = [7, 8, 7], [8, 11]
    s.set_row(3, wanted, np.array(prompt, np.int32), np.array(output, np.int32))
    for step in range(12):
        logits = logits_of(step)
        expected = logits[0].double().clone()
        for token in set(prompt) | set(output):
            value = expected[token]
            expected[token] = value / 1.4 if value > 0 else value * 1.4
        for token in set(output):
            expected[token] -= 0.6 * output.count(token) + 0.3
        got = int(take(s, logits, [3], [len(output)]).ids)
        assert got == int(expected.argmax())
        output.append(got)


def test_a_row_given_away_forgets() -> None:
    s = sampler()
    heavy = ask(
        temperature=1.0, repetition_penalty=2.0, bias_ids=(5,), bias_values=(100.0,), seed=3
    )
    s.set_row(0, heavy, np.arange(VOCAB, dtype=np.int32), NONE)
    assert int(take(s, logits_of(1), [0], [0]).ids) == 5
    s.set_row(0, ask(), NONE, NONE)
    assert int(take(s, logits_of(1), [0], [0]).ids) == int(logits_of(1).argmax())
    s.set_row(0, ask(frequency_penalty=2.0), NONE, NONE)
    assert int(take(s, logits_of(1), [0], [0]).ids) == int(logits_of(1).argmax())


def test_bias_and_minimum_length() -> None:
    s = sampler()
    logits = torch.zeros(2, VOCAB)
    logits[:, 2] = 9.0
    logits[:, 4] = 3.0
    s.set_row(0, ask(min_new_tokens=2, stop_ids=(2,)), NONE, NONE)
    s.set_row(1, ask(bias_ids=(6, 2), bias_values=(20.0, -1.0)), NONE, NONE)
    assert take(s, logits, [0, 1], [0, 0]).ids.tolist() == [4, 6]
    assert take(s, logits, [0, 1], [1, 1]).ids.tolist() == [4, 6]
    assert take(s, logits, [0, 1], [2, 2]).ids.tolist() == [2, 6]


def test_mask_and_logprobs_of_the_raw_logits() -> None:
    s = sampler()
    s.set_row(0, ask(bias_ids=(1,), bias_values=(50.0,)), NONE, NONE)
    logits = logits_of(8)
    mask = torch.zeros(1, 3, dtype=torch.int32)
    mask[0, 0] = 0b1000
    got = take(s, logits, [0], [0], masks=Masks(mask), logprobs=True, top=4)
    exact = logits.double().log_softmax(-1)[0]
    assert int(got.ids) == 3, "the mask comes after the bias"
    assert got.logprobs.item() == pytest.approx(exact[3].item(), abs=1e-5)
    assert got.top_ids[0].tolist() == exact.topk(4).indices.tolist()
    assert torch.allclose(got.top_logprobs[0].double(), exact.topk(4).values, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bias", [(), (5,)])
def test_a_nan_row_is_bad_alone(temperature: float, bias: tuple[int, ...]) -> None:
    s = sampler()
    for row in range(3):
        wanted = ask(
            temperature=temperature, seed=row, bias_ids=bias, bias_values=(0.5,) * len(bias)
        )
        s.set_row(row, wanted, NONE, NONE)
    logits = logits_of(5, 3)
    clean = take(s, logits, [0, 1, 2], [0, 0, 0])
    broken = logits.clone()
    broken[1, 40] = torch.nan
    got = take(s, broken, [0, 1, 2], [0, 0, 0])
    assert got.bad.tolist() == [False, True, False]
    assert got.ids[[0, 2]].tolist() == clean.ids[[0, 2]].tolist()
    assert int(got.ids[1]) == 0
