"""The guides of a step: one after the other, or side by side where that takes long."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ..grammar.lexers import threads_at_once
from ..grammar.llguidance_matcher import LLGuidanceMatcher
from ..grammar.side_by_side import SideBySide
from ..protocol.errors import GrammarError
from ..scheduler.batch import IntArray
from ..scheduler.request import Request

log = logging.getLogger(__name__)

ANYTHING = -1
"""A word of a mask that allows all its tokens."""
WORTH_THREADS = 0.0005
"""Seconds that filling must take before other threads help: asking them costs a part of it."""
MANY_STEPS = 32
"""Guides from which on their tokens are taken side by side."""


class Member(Protocol):
    """A guide, as its fellows see it."""

    @property
    def beside(self) -> LLGuidanceMatcher | None:
        """The matcher that has a say, where many of its kind can work at once."""
        ...

    def fill(self, row: IntArray) -> None:
        """Raises `GrammarError` when nothing is allowed."""
        ...

    def took(self, token: int) -> None:
        """Its matcher has gone on by the token that will be accepted next."""
        ...


class Job(NamedTuple):
    request: Request
    guide: Member
    at: int
    """The row of its mask."""


Failures = list[tuple[Request, GrammarError]]
Wanted = tuple[Job, LLGuidanceMatcher]


class Together:
    """Remembers what a mask takes of late that the library must compute. ``threads``: how many may
    work at once; None is as many as are of use on this machine."""

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads_at_once() if threads is None else threads
        self._side = SideBySide(self._threads)
        self._seconds = 0.0
        """One mask, on one thread."""

    def fill(self, jobs: Sequence[Job], masks: IntArray) -> Failures:
        """Fill the row of ``masks`` [M, ceil(V / 32)] of every job; those that could not be filled
        allow anything, and are returned."""
        failed: Failures = []
        wanted: list[Wanted] = []
        for job in jobs:
            matcher = job.guide.beside
            row = masks[job.at]
            try:
                if matcher is None:
                    job.guide.fill(row)
                elif matcher.computes(row):
                    if matcher.slow:
                        matcher.fill(row)
                    else:
                        wanted.append((job, matcher))
            except Exception as error:
                fail(job, error, row, failed)
        if wanted:
            began = time.process_time()  # of all threads, and of none that waits
            rest = self._one_by_one(wanted, masks, failed)
            while rest:
                rest = self._at_once(rest, masks, failed)
            took = (time.process_time() - began) / len(wanted)
            self._seconds += (took - self._seconds) / (8 if self._seconds else 1)
        return failed

    def _one_by_one(
        self, wanted: Sequence[Wanted], masks: IntArray, failed: Failures
    ) -> Sequence[Wanted]:
        """Compute rows while that takes a moment; what is left."""
        if self._threads > 1 and self._seconds * len(wanted) > WORTH_THREADS:
            return wanted
        until = time.perf_counter() + WORTH_THREADS
        for done, (job, matcher) in enumerate(wanted, 1):
            attempt(job, matcher.fill, masks, failed)
            if self._threads > 1 and time.perf_counter() > until:
                return wanted[done:]
        return ()

    def _at_once(
        self, wanted: Sequence[Wanted], masks: IntArray, failed: Failures
    ) -> Sequence[Wanted]:
        """Compute a row for every place where an output is; those for whom none is left by that."""
        first: dict[int, Wanted] = {}
        others: list[Wanted] = []
        for one in wanted:
            place = one[1].place
            if first.setdefault(id(one if place is None else place), one) is not one:
                others.append(one)
        try:
            self._side.fill(masks, [(matcher, job.at) for job, matcher in first.values()])
            done = True
        except Exception as error:  # the fault of one at most: each by itself
            own_error(error)
            done = False
        for job, matcher in first.values():
            attempt(job, matcher.filled if done else job.guide.fill, masks, failed)
        return [one for one in others if attempt(one[0], one[1].computes, masks, failed)]

    def accept(self, steps: Sequence[tuple[Member, int]]) -> None:
        """Have the matchers of many guides take a token each, before each guide accepts it. One
        that fails is asked again then."""
        if self._threads < 2 or len(steps) < MANY_STEPS:
            return
        wanted = [
            (guide, matcher, token)
            for guide, token in steps
            if (matcher := guide.beside) is not None
            and not matcher.slow
            and matcher.asks_library(token)
        ]
        if len(wanted) < MANY_STEPS:
            return
        try:
            taken = self._side.accept([(matcher, token) for _, matcher, token in wanted])
        except Exception as error:
            own_error(error)
            for _, matcher, _ in wanted:  # some may have gone on, who knows which
                with contextlib.suppress(GrammarError):  # `Guide.accept` will meet it again
                    matcher.begin_anew()
            return
        for (guide, matcher, token), one in zip(wanted, taken):
            if one:
                matcher.took(token)
                guide.took(token)


def attempt(
    job: Job, work: Callable[[IntArray], bool | None], masks: IntArray, failed: Failures
) -> bool | None:
    """What ``work`` says of the job's row; it may fail."""
    row = masks[job.at]
    try:
        return work(row)
    except Exception as error:
        fail(job, error, row, failed)


def fail(job: Job, error: Exception, row: IntArray, failed: Failures) -> None:
    """A job's row could not be filled."""
    row.fill(ANYTHING)
    failed.append((job.request, own_error(error)))


def own_error(error: Exception) -> GrammarError:
    """What the library behind a matcher raised, as an error of one request."""
    if isinstance(error, GrammarError):
        return error
    log.error("a grammar's library failed", exc_info=error)
    return GrammarError(f"the grammar's library failed: {type(error).__name__}")
