"""The tree, its eviction and the scheduling policies over a trace, without a model.

What the engine uses runs here too: `KVMemory`, the policies, wishes by pins as `Handles` makes
them. `belady` is what nobody can beat who serves the requests in that order.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from radix_trace import Ints, Trace
from ramet.runtime.memory.kv_memory import KVMemory
from ramet.runtime.memory.radix_node import Node
from ramet.runtime.protocol.messages import EngineSampling
from ramet.runtime.scheduler.policies import POLICIES, aged_first
from ramet.runtime.scheduler.request import Request

PAGE = 16
MOST_MARKS = 4
"""As many as a gateway makes of one text."""
PREFILL, STEP = 60_000.0, 0.01
"""Prompt tokens a second, and seconds a generated token, of the server that is not there."""
_NONE = np.empty(0, np.int32)


def belady(trace: Trace, capacity: int) -> int:
    """Prompt tokens found in a cache of so many tokens that knows the future: what is used again
    last goes first, token by token, ends of paths first. With ``capacity`` as large as the working
    set: what a cache without limits finds."""
    segments, lengths = trace.segments, trace.lengths.tolist()
    at = np.repeat(np.arange(len(trace)), np.diff(trace.starts))
    following = np.full(len(segments), len(trace))
    order = np.argsort(segments, kind="stable")
    again = np.flatnonzero(segments[order][1:] == segments[order][:-1])
    following[order[again]] = at[order[again + 1]]
    cached = [0] * len(lengths)
    use = [-1] * len(lengths)
    farthest: list[tuple[int, int, int]] = []
    used = hits = 0
    starts, path, next_use = trace.starts.tolist(), segments.tolist(), following.tolist()
    for i in range(len(trace)):
        first, last = starts[i], starts[i + 1]
        for place in range(first, last):
            segment = path[place]
            if place < last - 1:
                hits += cached[segment]
            used += lengths[segment] - cached[segment]
            cached[segment] = lengths[segment]
            use[segment] = next_use[place]
            heapq.heappush(farthest, (-next_use[place], first - place, segment))
        while used > capacity:
            when, depth, segment = heapq.heappop(farthest)
            if -when != use[segment] or not cached[segment]:
                continue
            gone = min(cached[segment], used - capacity)
            cached[segment] -= gone
            used -= gone
            if cached[segment]:
                heapq.heappush(farthest, (when, depth, segment))
    return hits


class Wishes:
    """The pins that a gateway would have the engine set. Of ``compiled`` programs all is known from
    the start: what their other requests will read is pinned, once for each stream that does. Of
    others (lazy), what they have read and written stays pinned until they go on from it, or end.
    Nothing is done where eviction does not look at pins."""

    def __init__(self, trace: Trace, memory: KVMemory, *, compiled: bool) -> None:
        self._trace = trace
        self._tree = memory.tree
        self._compiled = compiled
        self._heard = memory.looks_ahead
        self._left = Counter(trace.program.tolist())
        self._readers: dict[tuple[int, int], Counter[int]] = {}
        """Of (program, segment): requests that will read it, by what they read after it."""
        if compiled and self._heard:
            for i in range(len(trace)):
                self._read(i, 1)
        self._pins: dict[int, dict[int, tuple[Node, int]]] = {}
        self._awaited: dict[int, Node] = {}

    def _read(self, i: int, sign: int) -> None:
        program, path = int(self._trace.program[i]), self._trace.path(i).tolist()
        for segment, after in itertools.pairwise(path):
            streams = self._readers.setdefault((program, segment), Counter())
            streams[after] += sign
            if not streams[after]:
                del streams[after]
            if not streams:
                del self._readers[program, segment]

    def queued(self, i: int, prompt: Ints) -> None:
        """Request i could run now."""
        if not self._heard:
            return
        node = self._awaited[i] = self._tree.at(prompt)
        self._tree.pin(node, awaited=True)

    def admitted(self, i: int) -> None:
        node = self._awaited.pop(i, None)
        if node is not None:
            self._tree.unpin(node, awaited=True)

    def ended(self, i: int, tokens: Ints) -> None:
        """Request i has read its prompt, and left ``tokens`` in the tree."""
        if not self._heard:
            return
        program = int(self._trace.program[i])
        path = self._trace.path(i).tolist()
        pins = self._pins.setdefault(program, {})
        self._left[program] -= 1
        if self._compiled:
            self._read(i, -1)
            wanted = [min(len(self._readers.get((program, s), ())), MOST_MARKS) for s in path]
        else:
            wanted = [0] * (len(path) - 1) + [1]
        ends = np.cumsum(self._trace.lengths[path]).tolist()
        for segment, end, want in zip(path, ends, wanted):
            node, have = pins.pop(segment, (None, 0))
            if node is not None and node.parent is None:
                node, have = None, 0  # evicted, and the wish with it
            if node is None and want:
                node = self._tree.at(tokens[:end])
            if node is not None:
                self._wish(node, want, have, self._left[program] if self._compiled else 0)
                if want:
                    pins[segment] = node, want
        if not self._left[program]:
            for node, have in self._pins.pop(program).values():
                self._wish(node, 0, have, 0)

    def _wish(self, node: Node, want: int, have: int, ahead: int) -> None:
        """Of ``have`` wishes make ``want``, renewed by what is known now."""
        for _ in range(want):
            self._tree.pin(node, ahead=ahead)
        for _ in range(have):
            self._tree.unpin(node)


class Cache:
    """A `KVMemory` and the tokens of a trace's paths."""

    def __init__(self, trace: Trace, capacity: int, eviction: str, *, compiled: bool) -> None:
        self.memory = KVMemory(capacity // PAGE * PAGE, PAGE, eviction=eviction)
        self.wishes = Wishes(trace, self.memory, compiled=compiled)
        self.hits = self.refused = 0
        self._trace = trace
        self._offsets = np.concatenate(([0], np.cumsum(trace.lengths)))
        assert self._offsets[-1] < 2**31, "more distinct tokens than token ids"

    def tokens(self, i: int) -> tuple[Ints, int]:
        """Of a whole path, and how many are prompt."""
        offsets = self._offsets
        parts = [
            np.arange(offsets[s], offsets[s + 1], dtype=np.int32)
            for s in self._trace.path(i).tolist()
        ]
        whole = np.concatenate(parts)
        return whole, len(whole) - len(parts[-1])

    def enter(self, tokens: Ints, prompt: int) -> tuple[Node, int] | None:
        """Compute a path in the memory: the node that holds it and how much was there. ``None`` if
        it does not fit beside what is held."""
        memory = self.memory
        match = memory.hold(tokens[:prompt], b"")
        after = int(match.slots[-1]) if match.length else -1
        fresh = memory.allocate(len(tokens) - match.length, match.length, after)
        if fresh is None:
            memory.release(match.node, _NONE)
            return None
        slots = np.concatenate((match.slots, fresh))
        shared = memory.share(match.node, tokens, slots, match.length, b"")
        self.hits += match.length
        return shared.node, match.length

    def leave(self, i: int, tokens: Ints, node: Node) -> None:
        self.memory.release(node, _NONE)
        self.wishes.ended(i, tokens)


def replay(trace: Trace, capacity: int, eviction: str, *, compiled: bool = True) -> int:
    """Prompt tokens found, with requests one after the other in the order of the trace."""
    cache = Cache(trace, capacity, eviction, compiled=compiled)
    for i in range(len(trace)):
        tokens, prompt = cache.tokens(i)
        entered = cache.enter(tokens, prompt)
        assert entered is not None, "a request larger than the cache"
        cache.leave(i, tokens, entered[0])
    return cache.hits


@dataclass(slots=True)
class Served:
    """How a queue was served."""

    hits: int = 0
    order: list[int] = field(default_factory=list)
    """Requests as they were admitted."""
    waits: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    """Of programs, first arrival to last end."""
    decisions: list[float] = field(default_factory=list)
    """Seconds of CPU of each ordering of the queue."""


def rows_for(trace: Trace, load: float, step: float = STEP) -> int:
    """How many requests must run at a time for generating alone to keep them busy so much."""
    out = trace.lengths[trace.segments[trace.starts[1:] - 1]].sum()
    span = float(trace.arrival[-1] - trace.arrival[0])
    return max(1, round(out * step / span / load))


def serve(
    trace: Trace,
    capacity: int,
    policy: str,
    eviction: str,
    *,
    rows: int,
    prefill: float = PREFILL,
    step: float = STEP,
    ageing: float = 5.0,
    compiled: bool = True,
) -> Served:
    """The trace's programs served by a server that computes ``prefill`` prompt tokens a second, one
    prompt after the other, and generates one token every ``step`` seconds for each of ``rows``.
    Requests arrive when those they wait for have ended."""
    cache = Cache(trace, capacity, eviction, compiled=compiled)
    order = POLICIES[policy]().order
    served = Served()
    followers = trace.followers()
    events = [(float(trace.arrival[i]), 0, i) for i in followers.get(-1, [])]
    heapq.heapify(events)
    waiting: list[Request] = []
    running: dict[int, tuple[Ints, Node]] = {}
    left = Counter(trace.program.tolist())
    unsent = Counter(left)
    began: dict[int, float] = {}
    free_at = 0.0
    serial = 0

    def arrive(i: int, now: float) -> None:
        nonlocal serial
        serial += 1
        program = int(trace.program[i])
        unsent[program] -= 1
        began.setdefault(program, now)
        tokens, prompt = cache.tokens(i)
        cache.wishes.queued(i, tokens[:prompt])
        new = EngineSampling(max_new_tokens=len(tokens) - prompt)
        waiting.append(
            Request(i, b"", new, tokens, prompt, program=program + 1, arrival=now, serial=serial,
                    remaining=unsent[program] if compiled else 0)
        )  # fmt: skip

    def end(i: int, now: float) -> None:
        cache.leave(i, *running.pop(i))
        program = int(trace.program[i])
        left[program] -= 1
        if not left[program]:
            served.latencies.append(now - began.pop(program))
        for follower in followers.get(i, []):
            heapq.heappush(events, (now + float(trace.think[follower]), 0, follower))

    while events:
        now = events[0][0]
        while events and events[0][0] == now:
            _, ends, i = heapq.heappop(events)
            (end if ends else arrive)(i, now)
        if not waiting or len(running) >= rows:
            continue
        clock = time.process_time()
        ordered = [*aged_first(order(waiting, cache.memory), waiting, now, ageing)]
        served.decisions.append(time.process_time() - clock)
        for request in ordered[: rows - len(running)]:
            entered = cache.enter(request.tokens, request.prompt_len)
            if entered is None:
                if not running:
                    raise ValueError(f"request {request.rid} is larger than the cache")
                break
            cache.wishes.admitted(request.rid)
            waiting.remove(request)
            node, found = entered
            running[request.rid] = request.tokens, node
            served.order.append(request.rid)
            served.waits.append(now - request.arrival)
            free_at = max(free_at, now) + (request.prompt_len - found) / prefill
            new = len(request.tokens) - request.prompt_len
            heapq.heappush(events, (free_at + new * step, 1, request.rid))
    served.hits = cache.hits
    return served
