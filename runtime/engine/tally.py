"""What an engine counts and times for metrics, at the cost of a few numbers a step; and how long a
request took."""

from __future__ import annotations

import bisect
import time
from collections import deque
from typing import Any, NamedTuple

from ..scheduler.batch import IntArray
from ..scheduler.request import Request
from ..scheduler.rows import Rows

STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class Spans(NamedTuple):
    """Seconds of one request: until its grammar was there, in the queue, from there to its first
    token, from there to its end. What it never came to took none."""

    grammar: float
    queue: float
    prefill: float
    decode: float


class Tally:
    """Of one engine."""

    def __init__(self) -> None:
        self.finished = 0
        """Requests, but for those that somebody aborted; the next two are of their prompts."""
        self.prompt_tokens = 0
        self.cache_hit_tokens = 0
        self.computed_tokens = 0
        """By steps that were launched."""
        self.output_tokens = 0
        """That were sampled."""
        self.mask_seconds = 0.0
        """Spent on saying which tokens constrained rows may take."""
        self._counts = [0] * (len(STEP_TOKENS) + 1)
        self._launched: deque[float] = deque()
        self._landed = 0.0

    def launch(self, tokens: int) -> None:
        """A step of so many tokens is about to be launched."""
        self._launched.append(time.perf_counter())
        self._counts[bisect.bisect_left(STEP_TOKENS, tokens)] += 1
        self.computed_tokens += tokens

    def landed(self) -> float:
        """The oldest step under way is over. Returns how many seconds it took, not counting those
        that it waited for the one before."""
        now = time.perf_counter()
        began = max(self._launched.popleft(), self._landed)
        self._landed = now
        return now - began

    def sampled(self, rows: Rows, at: IntArray) -> None:
        """These rows have a token more."""
        self.output_tokens += len(at)
        fresh = at[rows.first_at[at] == 0.0]
        if len(fresh):
            rows.first_at[fresh] = time.monotonic()

    def finish(self, request: Request) -> None:
        """A request is over, and was not aborted."""
        self.finished += 1
        self.prompt_tokens += request.prompt_len
        self.cache_hit_tokens += max(request.cached_tokens, 0)

    def facts(self, forced_tokens: int) -> dict[str, Any]:
        """All of it as plain data. ``forced_tokens`` are output that nobody sampled."""
        return {
            "step_tokens": self._step_tokens(),
            "mask_seconds": self.mask_seconds,
            "finished": self.finished,
            "prompt_tokens": self.prompt_tokens,
            "cache_hit_tokens": self.cache_hit_tokens,
            "computed_tokens": self.computed_tokens,
            "output_tokens": self.output_tokens + forced_tokens,
            "forced_tokens": forced_tokens,
        }

    def _step_tokens(self) -> dict[str, Any]:
        """A histogram: upper bounds, what fell under each (and above all), their sum."""
        return {"bounds": STEP_TOKENS, "counts": self._counts, "sum": self.computed_tokens}


def spans_of(request: Request) -> Spans:
    """Of a request that ends now, which has left its row."""
    now = time.monotonic()
    if not request.arrival:
        return Spans(0.0, 0.0, 0.0, 0.0)
    queued = request.brought_in or request.arrival
    admitted = request.admitted or now
    first = request.first_token or now
    return Spans(queued - request.arrival, admitted - queued, first - admitted, now - first)
