"""Which captured step a batch of rows that decode gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from ramet.runtime.model import decode_steps
from ramet.runtime.model.decode_steps import DECODE_SIZES, FEW, NEAR, DecodeSteps


class Step:
    captured: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, parts, size, reach):
        self.size, self.reach = size, reach

    def capture(self):
        self.captured.append((self.size, self.reach))


@pytest.fixture
def ladders(monkeypatch):
    monkeypatch.setattr(decode_steps, "CapturedDecode", Step)
    monkeypatch.setattr(Step, "captured", [])

    def make(largest, context, **ops):
        parts = SimpleNamespace(decoder=SimpleNamespace(ops=SimpleNamespace(**ops)))
        return DecodeSteps(parts, largest, context)

    return make


def chosen(steps, *lengths):
    lens = np.array(lengths, np.int32)
    step = steps.step_for(SimpleNamespace(rows=np.arange(len(lens)), kv_lens=lens))
    return step and (step.size, step.reach)


def test_few_short_texts_get_a_step_of_their_own(ladders):
    steps = ladders(64, 4096)
    assert chosen(steps, 5) == (1, NEAR)
    assert chosen(steps, NEAR, NEAR, NEAR) == (4, NEAR)
    assert chosen(steps, NEAR, NEAR + 1, 3) == (4, 4096)
    assert chosen(steps, *[9] * FEW) == (FEW, NEAR)
    assert chosen(steps, *[9] * (FEW + 1)) == (16, 4096)
    assert chosen(steps, *[9] * 64) == (64, 4096)
    assert chosen(steps, *[9] * 65) is None


@pytest.mark.parametrize(("context", "ops"), [(NEAR, {}), (4096, {"invariant": True})])
def test_one_ladder_where_another_would_be_no_different_or_may_not_be(ladders, context, ops):
    steps = ladders(8, context, **ops)
    assert len(steps) == 4
    assert chosen(steps, 5) == (1, context)


@pytest.mark.parametrize("largest", [1, 3, 8, 100, 512, 600])
def test_the_ladder_reaches_as_many_rows_as_there_are(ladders, largest):
    steps = ladders(largest, NEAR)
    assert steps.sizes == tuple(sorted({*(s for s in DECODE_SIZES if s <= largest), largest}))
    assert chosen(steps, *[1] * largest) == (largest, NEAR)
    steps.capture()
    assert [size for size, _ in Step.captured] == sorted(steps.sizes, reverse=True)
