"""Masks filled one after the other, and side by side."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from ramet.runtime.engine.filling import Job, MaskFiller
from ramet.runtime.protocol import GrammarError


class Slow:
    """Waits until ``crowd`` others fill too, or a little; notes on which thread."""

    def __init__(self, value, apart, barrier):
        self.value, self.apart, self.barrier = value, apart, barrier
        self.thread = ""

    def fill(self, row):
        self.thread = threading.current_thread().name
        if self.apart and self.barrier is not None:
            self.barrier.wait(10)
        if self.value < 0:
            raise GrammarError("nothing is left")
        row.fill(self.value)


def jobs_of(values, apart=True, barrier=None):
    out = np.zeros((len(values), 4), np.int32)
    guides = [Slow(value, apart, barrier) for value in values]
    return out, guides, [Job(i, g, row) for i, (g, row) in enumerate(zip(guides, out))]


def test_what_takes_long_is_filled_side_by_side():
    filler = MaskFiller(threads=4)
    filler._seconds = 1.0
    # Four must be inside at once, three times over, or the barrier breaks.
    out, guides, jobs = jobs_of(range(12), barrier=threading.Barrier(4))
    assert filler.fill(jobs) == []
    assert out[:, 0].tolist() == list(range(12))
    assert len({guide.thread for guide in guides}) == 4
    filler.close()


@pytest.mark.parametrize(("seconds", "apart"), [(0.0, True), (1.0, False)])
def test_what_is_quick_or_shares_something_stays_on_its_thread(seconds, apart):
    filler = MaskFiller(threads=4)
    filler._seconds = seconds
    out, guides, jobs = jobs_of(range(12), apart=apart)
    assert filler.fill(jobs) == []
    assert out[:, 3].tolist() == list(range(12))
    assert {guide.thread for guide in guides} == {threading.current_thread().name}


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_rows_that_fail_allow_anything_and_are_named(seconds):
    filler = MaskFiller(threads=3)
    filler._seconds = seconds
    out, _, jobs = jobs_of([5, -1, 6, -1, 7])
    failed = filler.fill(jobs)
    assert sorted(request for request, _ in failed) == [1, 3]
    assert out[:, 0].tolist() == [5, -1, 6, -1, 7]
    assert filler.fill([]) == []
    filler.close()


def test_how_long_a_row_takes_is_learnt():
    filler = MaskFiller(threads=2)
    for _ in range(30):
        filler.fill(jobs_of([1, 2, 3])[2])
    assert 0 < filler._seconds < 0.0005
