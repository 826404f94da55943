"""Masks of a step's rows, filled one after the other, or side by side where that takes long."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

from ..protocol.errors import GrammarError
from ..scheduler.batch import IntArray
from ..scheduler.request import Request

ANYTHING = -1
"""A word of a mask that allows all its tokens."""
WORTH_THREADS = 0.002
"""Seconds that filling must take before it is shared out: handing over costs a part of one."""
MOST_THREADS = 8


class Filling(Protocol):
    """What can fill a mask. ``apart``: it shares nothing with others, and holds no lock meanwhile,
    so that several may at the same time."""

    @property
    def apart(self) -> bool: ...

    def fill(self, row: IntArray) -> None:
        """Raises `GrammarError` when nothing is allowed."""
        ...


class Job(NamedTuple):
    request: Request
    guide: Filling
    mask: IntArray


Failures = list[tuple[Request, GrammarError]]


class MaskFiller:
    """Remembers how long a row takes of late."""

    def __init__(self, threads: int | None = None) -> None:
        cores = len(os.sched_getaffinity(0))
        self._threads = min(MOST_THREADS, cores // 2) if threads is None else threads
        self._pool: ThreadPoolExecutor | None = None
        self._seconds = 0.0
        """A row."""

    def fill(self, jobs: Sequence[Job]) -> Failures:
        """Fill every mask; those that could not be allow anything, and are returned."""
        if not jobs:
            return []
        began = time.perf_counter()
        shares = 1
        if self._threads > 1 and self._seconds * len(jobs) > WORTH_THREADS:
            shares = min(self._threads, sum(job.guide.apart for job in jobs))
        failed = _fill(jobs) if shares < 2 else self._share_out(jobs, shares)
        took = (time.perf_counter() - began) * max(shares, 1) / len(jobs)
        self._seconds += (took - self._seconds) / 8
        return failed

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _share_out(self, jobs: Sequence[Job], shares: int) -> Failures:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads - 1, thread_name_prefix="ramet-masks")
        apart = [job for job in jobs if job.guide.apart]
        others = [self._pool.submit(_fill, apart[i::shares]) for i in range(1, shares)]
        mine = _fill([*(job for job in jobs if not job.guide.apart), *apart[0::shares]])
        return [*mine, *(failure for other in others for failure in other.result())]


def _fill(jobs: Sequence[Job]) -> Failures:
    failed: Failures = []
    for request, guide, mask in jobs:
        try:
            guide.fill(mask)
        except GrammarError as error:
            mask.fill(ANYTHING)
            failed.append((request, error))
    return failed
