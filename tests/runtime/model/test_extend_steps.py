"""Which captured step a batch of prompts takes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ramet.runtime.model.extend_steps import NEAR, ExtendSteps
from ramet.runtime.model.graphs import Parts
from ramet.runtime.model.tables import RequestTables
from ramet.runtime.scheduler.batch import StepBatch


@pytest.fixture
def make_steps():
    def make(context: int, invariant: bool = False) -> ExtendSteps:
        decoder = SimpleNamespace(ops=SimpleNamespace(invariant=invariant))
        tables = RequestTables(9, context)
        return ExtendSteps(Parts(decoder, torch.empty(0), tables, None, 8, None), context)

    return make


def prompts(*lengths: tuple[int, int]) -> StepBatch:
    """Requests of (new tokens, tokens in all)."""
    new, whole = np.array(lengths, np.int32).T
    zeros = np.zeros(int(new.sum()), np.int32)
    rows = np.arange(len(new), dtype=np.int32)
    return StepBatch(
        rows=rows, q_lens=new, kv_lens=whole, ids=zeros, slots=zeros, samples=rows,
        steps=np.zeros_like(rows),
    )  # fmt: skip


def reach(step) -> int:
    return step._meta.max_kv


def test_short_texts_take_the_step_that_does_not_cut_keys(make_steps):
    steps = make_steps(4096)
    step = steps.step_for(prompts((100, 100), (20, NEAR)))
    assert (step.size, reach(step)) == (128, NEAR)


@pytest.mark.parametrize("batch", [prompts((16, NEAR + 1)), prompts((100, 100), (16, 4096))])
def test_a_long_text_takes_the_step_that_may(make_steps, batch):
    assert reach(make_steps(4096).step_for(batch)) == 4096


def test_many_short_texts_take_a_larger_step(make_steps):
    step = make_steps(4096).step_for(prompts(*[(100, 100)] * 10))
    assert (step.size, reach(step)) == (1024, 4096)


def test_more_requests_than_a_small_step_holds_take_a_larger_one(make_steps):
    assert make_steps(4096).step_for(prompts(*[(1, 1)] * 9)).size == 192


def test_none_holds_more_than_the_largest(make_steps):
    assert make_steps(4096).step_for(prompts((2049, 2049))) is None


def test_steps_end_with_the_context(make_steps):
    assert make_steps(100).sizes == (16, 32, 64, 96)


def test_where_keys_are_never_cut_one_ladder_is_enough(make_steps):
    assert len(make_steps(1024, invariant=True)) == len(make_steps(1024).sizes)
