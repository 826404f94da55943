"""What can be chosen by who knows every program, but not when its requests come.

`belady` knows the order of everything. How much of that an engine could know is shown by a choice
that is given all else: of each live program which requests will come and what they read, and how
long such requests took to come, on average, after so much waiting. Nothing is proven of it; it
takes seconds of computing for each second of a server, and is no policy.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from radix_trace import Trace

NEVER = 1e12
SOON = 0.05
"""Seconds in which a request comes that waits for nothing."""


class Gaps:
    """Of all gaps in a trace between the arrival of a request and that of one that waited for it:
    how much longer they last on average, when so much has passed."""

    def __init__(self, trace: Trace) -> None:
        waits = np.flatnonzero(trace.after >= 0)
        gaps = np.sort(trace.arrival[waits] - trace.arrival[trace.after[waits]])
        self._gaps = gaps if len(gaps) else np.ones(1)
        self._left = np.cumsum(self._gaps[::-1])[::-1]
        self.mean = float(self._gaps.mean())

    def more(self, age: float) -> float:
        at = int(np.searchsorted(self._gaps, age))
        count = len(self._gaps) - at
        if count < 5:
            return self.mean
        return max(float(self._left[at]) / count - age, 1e-3)


class Knowledge:
    """What is known at one time of the trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._after = trace.after.tolist()
        self._gaps = Gaps(trace)
        self._came: dict[int, float] = {}
        self._known: set[int] = set()
        self._requests: dict[int, list[int]] = defaultdict(list)
        for i, program in enumerate(trace.program.tolist()):
            self._requests[program].append(i)
        self._readers: dict[int, set[int]] = defaultdict(set)
        """Of a segment, the requests to come that read it."""
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._programs: dict[int, set[int]] = defaultdict(set)

    def came(self, i: int, now: float) -> None:
        path, program = self._trace.path(i).tolist(), int(self._trace.program[i])
        if program not in self._known:
            self._known.add(program)
            for request in self._requests[program]:
                for segment in self._trace.path(request)[:-1].tolist():
                    self._readers[segment].add(request)
        for segment in path:
            self._readers[segment].discard(i)
            self._first.setdefault(segment, now)
            self._last[segment] = now
            self._programs[segment].add(program)
        self._came[i] = now

    def next_use(self, segments: list[int], now: float) -> list[float]:
        """When each is expected to be read: all its readers' rates are added, and that at which
        programs came to read it so far, if several did."""
        rates: dict[int, float] = {}
        found: list[float] = []
        for segment in segments:
            rate = 0.0
            for request in self._readers[segment]:
                if request not in rates:
                    rates[request] = 1 / self._wait(request, now)
                rate += rates[request]
            programs = len(self._programs[segment])
            if programs > 1:
                rate += programs / max(now - self._first[segment], 1.0)
            found.append(now + 1 / rate if rate else NEVER - self._last[segment])
        return found

    def _wait(self, request: int, now: float) -> float:
        """Seconds that a request is expected to take to come."""
        turns, before = 0, self._after[request]
        while before >= 0 and before not in self._came:
            turns, before = turns + 1, self._after[before]
        first = SOON if before < 0 else self._gaps.more(now - self._came[before])
        return first + turns * self._gaps.mean


def informed(trace: Trace, capacity: int) -> int:
    """Prompt tokens found in a cache of so many tokens, from which goes what is expected to be read
    last, token by token, ends of paths first."""
    knowledge = Knowledge(trace)
    lengths = trace.lengths.tolist()
    cached: dict[int, int] = {}
    depth: dict[int, int] = {}
    used = hits = 0
    for i in range(len(trace)):
        path = trace.path(i).tolist()
        now = float(trace.arrival[i])
        whole = True
        for place, segment in enumerate(path):
            have = cached.get(segment, 0)
            if whole and place < len(path) - 1:
                hits += have
                whole = have == lengths[segment]
            used += lengths[segment] - have
            cached[segment] = lengths[segment]
            depth[segment] = place
        knowledge.came(i, now)
        if used <= capacity:
            continue
        segments = list(cached)
        times = knowledge.next_use(segments, now)
        order = sorted(
            range(len(segments)), key=lambda j: (-round(times[j], 6), -depth[segments[j]])
        )
        for j in order:
            gone = min(cached[segments[j]], used - capacity)
            cached[segments[j]] -= gone
            used -= gone
            if not cached[segments[j]]:
                del cached[segments[j]]
            if used <= capacity:
                break
    return hits
