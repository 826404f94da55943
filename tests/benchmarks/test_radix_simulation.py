"""The simulator against naive models of what it simulates."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from ramet.runtime.memory.eviction import POLICIES as EVICTIONS
from ramet.runtime.scheduler.policies import POLICIES


def tiny(traces, seed, requests=60):
    """Programs of short paths over few segments."""
    dice = np.random.default_rng(seed)
    lengths = dice.integers(1, 12, 400)
    fresh = itertools.count(40)
    paths, programs = [], []
    tree = {}
    for _ in range(requests):
        path = [int(dice.integers(0, 3))]
        for _ in range(int(dice.integers(0, 3))):
            path.append(tree.setdefault((*path, int(dice.integers(0, 2))), 3 + len(tree)))
        paths.append([*path, next(fresh)])
        programs.append(int(dice.integers(0, 12)))
    return traces.Trace(
        np.array(programs),
        np.cumsum(dice.exponential(0.1, requests)),
        np.full(requests, -1),
        np.zeros(requests),
        np.concatenate(([0], np.cumsum([len(path) for path in paths]))),
        np.concatenate(paths),
        lengths,
    )


def token_paths(trace):
    ends = np.cumsum(trace.lengths)
    for i in range(len(trace)):
        tokens = [t for s in trace.path(i) for t in range(ends[s] - trace.lengths[s], ends[s])]
        yield tuple(tokens), len(tokens) - int(trace.lengths[trace.path(i)[-1]])


class NaiveLRU:
    """A set of prefixes at which edges end, each with its last use; nothing is a tree."""

    def __init__(self, total, page):
        self.total, self.page, self.clock = total, page, 0
        self.used = {}

    def parent(self, end):
        return max((len(e) for e in self.used if len(e) < len(end) and end[: len(e)] == e),
                   default=0)  # fmt: skip

    def walk(self, tokens):
        """As far as is cached: cut the edge there, and all on the way are used."""
        self.clock += 1
        best = max((self.common(end, tokens) for end in self.used), default=0)
        below = [end for end in self.used if end[:best] == tokens[:best]]
        if best and tokens[:best] not in self.used:
            self.used[tokens[:best]] = self.used[min(below, key=len)]
        for end in self.used:
            if end == tokens[: len(end)]:
                self.used[end] = self.clock
        return best

    @staticmethod
    def common(a, b):
        return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))

    def size(self):
        return sum(len(end) - self.parent(end) for end in self.used)

    def make_room(self, count, held):
        missing = count - (self.total - self.size())
        if missing <= 0:
            return
        locked = sum(len(e) - self.parent(e) for e in self.used if held[: len(e)] == e)
        missing = min(self.size() - locked, missing + self.total // 256)
        while missing > 0:
            leaves = [e for e in self.used if e != held[: len(e)] and not self.goes_on(e)]
            end = min(leaves, key=self.used.__getitem__)
            gone = min(-(-missing // self.page) * self.page, len(end) - self.parent(end))
            use = self.used.pop(end)
            if len(end) - gone > self.parent(end):
                self.used[end[: len(end) - gone]] = use
            missing -= gone

    def goes_on(self, end):
        return any(len(o) > len(end) and o[: len(end)] == end for o in self.used)

    def request(self, tokens, prompt):
        hit = self.walk(tokens[:prompt])
        self.make_room(len(tokens) - hit, tokens[:hit])
        self.walk(tokens)
        self.used[tokens] = self.clock
        return hit


@pytest.mark.parametrize("seed", range(20))
def test_lru_finds_what_a_naive_one_finds(traces, simulate, seed):
    trace = tiny(traces, seed)
    size = max(64, trace.working_set() // 2) // 16 * 16
    naive = NaiveLRU(size, 16)
    expected = sum(naive.request(*request) for request in token_paths(trace))
    assert simulate.replay(trace, size, "lru") == expected > 0


def naive_belady(trace, capacity):
    """Token by token."""
    paths = [path for path, _ in token_paths(trace)]
    cached, hits = set(), 0
    for i, (path, prompt) in enumerate(token_paths(trace)):
        hits += sum(token in cached for token in path[:prompt])
        cached.update(path)
        uses = {}
        for later in range(len(paths) - 1, i, -1):
            uses.update(dict.fromkeys(paths[later], later))
        worst = sorted(cached, key=lambda t: uses.get(t, len(paths)), reverse=True)
        cached -= set(worst[: max(0, len(cached) - capacity)])
    return hits


@pytest.mark.parametrize("seed", range(4))
def test_belady_is_belady_and_nobody_beats_it(traces, simulate, seed):
    trace = tiny(traces, seed)
    size = max(64, trace.working_set() // 3) // 16 * 16
    best = simulate.belady(trace, size)
    assert best == naive_belady(trace, size)
    for eviction, compiled in itertools.product(EVICTIONS, (True, False)):
        assert simulate.replay(trace, size, eviction, compiled=compiled) <= best


@pytest.mark.parametrize("name", ["few-shot", "tot", "agents"])
def test_a_cache_of_the_working_set_finds_all_that_was_ever_there(traces, simulate, name):
    trace = traces.GENERATORS[name](400, seed=2, concurrent=8)
    full = trace.working_set()
    seen, repeated = set(), 0
    for i in range(len(trace)):
        repeated += sum(int(trace.lengths[s]) for s in trace.path(i)[:-1] if s in seen)
        seen.update(trace.path(i).tolist())
    assert simulate.belady(trace, full) == repeated
    assert simulate.belady(trace, full // 2) < repeated
    half = full // 32 * 16
    best = simulate.belady(trace, half)
    found = {e: simulate.replay(trace, half, e) for e in EVICTIONS}
    assert found["lru"] < found["program"] <= best


@pytest.mark.parametrize("name", ["few-shot", "tot", "agents"])
def test_to_know_all_but_times_is_between_a_policy_and_belady(traces, simulate, bench_module, name):
    informed = bench_module("radix_informed").informed
    trace = traces.GENERATORS[name](1500, seed=1, concurrent=16)
    half = trace.working_set() // 32 * 16
    best, known = simulate.belady(trace, half), informed(trace, half)
    assert simulate.replay(trace, half, "lru") < known < best
    assert known > 0.9 * best
    full = trace.working_set()
    assert informed(trace, int(trace.lengths.sum())) == simulate.belady(trace, full)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_queue_serves_all_and_keeps_the_order_of_programs(traces, simulate, policy):
    trace = traces.GENERATORS["tot"](300, seed=1, concurrent=6)
    rows = simulate.rows_for(trace, 1.0)
    served = simulate.serve(trace, trace.working_set(), policy, "program", rows=rows)
    assert sorted(served.order) == list(range(300))
    assert len(served.latencies) == len(set(trace.program.tolist()))
    place = {i: at for at, i in enumerate(served.order)}
    assert all(place[b] < place[i] for i, b in enumerate(trace.after.tolist()) if b >= 0)
    assert len(served.decisions) > 0
    assert min(served.waits) >= 0


def test_whole_programs_finish_sooner_when_the_shortest_goes_first(traces, simulate):
    trace = traces.GENERATORS["tot"](1200, seed=1, concurrent=16)
    rows = simulate.rows_for(trace, 1.0)
    median = {
        policy: np.median(
            simulate.serve(trace, trace.working_set(), policy, "program", rows=rows).latencies
        )
        for policy in ("fcfs", "program")
    }
    assert median["program"] < median["fcfs"]


def test_a_trace_is_the_same_from_the_same_seed_and_from_its_file(traces, tmp_path):
    trace = traces.agents(200, seed=3, concurrent=4)
    trace.save(tmp_path / "trace.npz")
    again = traces.agents(200, seed=3, concurrent=4)
    loaded = traces.Trace.load(tmp_path / "trace.npz")
    for other in (again, loaded):
        assert all(
            np.array_equal(getattr(trace, name), getattr(other, name))
            for name in ("program", "arrival", "after", "think", "starts", "segments", "lengths")
        )
    assert not np.array_equal(trace.arrival, traces.agents(200, seed=4, concurrent=4).arrival)
    sizes = [int(trace.lengths[trace.path(i)].sum()) for i in range(len(trace))]
    assert trace.longest() == max(sizes)
    first = Counter(trace.program.tolist())
    assert max(first.values()) > 2
    assert (np.diff(trace.arrival) >= 0).all()
    assert all(before < i for i, before in enumerate(trace.after.tolist()))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"lengths": np.array([0])}, "empty segment"), ({"starts": np.array([0, 1])}, "different"),
     ({"segments": np.array([9, 9])}, "starts"), ({"program": None}, "program")],
)  # fmt: skip
def test_a_file_that_is_no_trace_is_refused(traces, tmp_path, wrong, said):
    trace = traces.few_shot(20, concurrent=2)
    trace.save(tmp_path / "trace.npz")
    with np.load(tmp_path / "trace.npz") as data:
        columns = {name: data[name] for name in data}
    columns.update(wrong)
    columns = {name: value for name, value in columns.items() if value is not None}
    if "lengths" in wrong:
        columns["lengths"] = np.where(np.arange(len(trace.lengths)) == 1, 0, trace.lengths)
    np.savez(tmp_path / "wrong.npz", **columns)
    with pytest.raises(ValueError, match=said):
        traces.Trace.load(tmp_path / "wrong.npz")


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04junk", b"ramet-tr"])
def test_any_other_file_is_refused_by_its_name(traces, tmp_path, content):
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(ValueError, match="other is no trace"):
        traces.Trace.load(tmp_path / "other")
    with pytest.raises(IsADirectoryError):
        traces.Trace.load(tmp_path)
    with pytest.raises(FileNotFoundError):
        traces.Trace.load(tmp_path / "gone")


def test_a_damaged_trace_is_refused_by_its_name(traces, tmp_path):
    traces.few_shot(20, concurrent=2).save(tmp_path / "trace.npz")
    data = bytearray((tmp_path / "trace.npz").read_bytes())
    data[60:90] = bytes(30)
    (tmp_path / "trace.npz").write_bytes(data)
    with pytest.raises(ValueError, match=r"trace.npz: "):
        traces.Trace.load(tmp_path / "trace.npz")
