"""Segments that decoding rows share, found from slots as a radix tree hands them out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ramet.runtime.scheduler.rows import Rows
from ramet.runtime.scheduler.segments import REFRESH, SegmentFinder, SharingCost
from ramet.runtime.scheduler.tree_plan import TreePlan

CHEAP = SharingCost(reader=1, segment=0, step=1)


def covered(plan: TreePlan, kv_lens: np.ndarray) -> np.ndarray:
    """[B, longest] how often each item's positions are read: it should be once up to its
    length."""
    times = np.zeros((len(kv_lens), int(kv_lens.max())), np.int32)
    for s, (start, end) in enumerate(zip(plan.starts, plan.ends)):
        times[plan.readers[plan.reader_starts[s] : plan.reader_starts[s + 1]], start:end] += 1
    for item, (tail, length) in enumerate(zip(plan.tails, kv_lens)):
        times[item, tail:length] += 1
    return times


class Forest:
    """Rows whose slots are paths of random trees: children continue what a parent holds."""

    def __init__(self, count: int, seed: int, depth: int = 6, longest: int = 200) -> None:
        self.random = np.random.default_rng(seed)
        self.rows = Rows(count + 4, depth * longest + 64)
        self.rows.slots[:] = self.random.integers(0, 9, self.rows.slots.shape)  # stale ones
        self.depth, self.longest = depth, longest
        self.next = 1
        self.paths: list[np.ndarray] = [np.empty(0, np.int32)]
        self.length: dict[int, int] = {}

    def slots(self, count: int) -> np.ndarray:
        self.next += count
        return np.arange(self.next - count, self.next, dtype=np.int32)

    def enter(self) -> int:
        """A row whose slots are those of some path, then some of its own."""
        path = self.paths[self.random.integers(len(self.paths))]
        own = self.slots(int(self.random.integers(1, self.longest)))
        whole = np.concatenate((path, own))
        if len(whole) < (self.depth - 1) * self.longest and self.random.random() < 0.5:
            self.paths.append(whole[: self.random.integers(len(path), len(whole) + 1)])
        row = next(r for r in range(len(self.rows.epoch)) if r not in self.length)
        self.rows.epoch[row] += 1
        self.rows.slots[row, : len(whole)] = whole
        self.length[row] = len(whole)
        self.grow(row)
        return row

    def grow(self, row: int) -> None:
        self.rows.slots[row, self.length[row]] = self.slots(1)[0]
        self.length[row] += 1

    def leave(self, row: int) -> None:
        del self.length[row]
        self.rows.epoch[row] += 1

    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        members = np.array(sorted(self.length), np.int32)
        return members, np.array([self.length[r] for r in members.tolist()], np.int32)


def check(plan, rows, members, kv_lens) -> None:
    """Every key once, none of another's, and at least one in each tail."""
    want = np.arange(int(kv_lens.max())) < kv_lens[:, None]
    assert (covered(plan, kv_lens) == want).all()
    assert (plan.tails < kv_lens).all()
    for s, (start, end) in enumerate(zip(plan.starts, plan.ends)):
        readers = plan.readers[plan.reader_starts[s] : plan.reader_starts[s + 1]]
        assert len(readers) > 1
        assert end > start
        slots = rows.slots[members[readers], start:end]
        assert (slots == slots[0]).all(), "readers of one segment have other slots there"


def best(rows, members, kv_lens) -> int:
    """Keys read if every shared run is read once: distinct slots."""
    return len({s for r, n in zip(members, kv_lens) for s in rows.slots[r, :n].tolist()})


def read(plan, kv_lens) -> int:
    if plan is None:
        return int(kv_lens.sum())
    return int((plan.ends - plan.starts).sum() + (kv_lens - plan.tails).sum())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(count=st.integers(2, 40), seed=st.integers(0, 10**6), longest=st.integers(2, 300))
def test_segments_cover_every_key_once(count, seed, longest):
    forest = Forest(count, seed, longest=longest)
    for _ in range(count):
        forest.enter()
    members, kv_lens = forest.batch()
    plan = SegmentFinder(forest.rows, CHEAP).find(members, kv_lens)
    if plan is not None:
        check(plan, forest.rows, members, kv_lens)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), events=st.lists(st.integers(0, 9), max_size=30))
def test_coming_and_going_finds_what_a_new_start_finds(seed, events):
    forest = Forest(24, seed, longest=40)
    finder = SegmentFinder(forest.rows, CHEAP)
    for _ in range(5):
        forest.enter()
    for event in [0, *events]:
        if event < 4 and len(forest.length) < 24:
            for _ in range(1 + event):
                forest.enter() if len(forest.length) < 24 else None
        elif event < 7 and len(forest.length) > 1:
            for row in list(forest.length)[: event - 3]:
                forest.leave(row) if len(forest.length) > 1 else None
        for row in forest.length:
            forest.grow(row)
        members, kv_lens = forest.batch()
        plan = finder.find(members, kv_lens)
        if plan is None:
            continue
        check(plan, forest.rows, members, kv_lens)
        free = SharingCost(reader=0, segment=0, step=1)
        assert finder._common.min() >= 0
        fresh = SegmentFinder(forest.rows, free)
        again = fresh.find(members, kv_lens)
        finder._cost = free
        assert read(finder._decide(members), kv_lens) <= read(again, kv_lens)
        finder._cost = CHEAP


def test_rows_placed_one_by_one_share_all_there_is():
    for seed in range(20):
        forest = Forest(30, seed)
        finder = SegmentFinder(forest.rows, SharingCost(reader=0, segment=0, step=1))
        for _ in range(30):
            forest.enter()
            members, kv_lens = forest.batch()
            plan = finder.find(members, kv_lens)
            assert read(plan, kv_lens) == best(forest.rows, members, kv_lens)
        for row in list(forest.length)[::2]:
            forest.leave(row)
            members, kv_lens = forest.batch()
            plan = finder.find(members, kv_lens)
            assert read(plan, kv_lens) == best(forest.rows, members, kv_lens)


def test_a_plan_is_kept_until_someone_comes_or_goes():
    forest = Forest(8, 1)
    forest.paths = [forest.slots(150)]
    for _ in range(5):
        forest.enter()
    finder = SegmentFinder(forest.rows, CHEAP)
    plan = finder.find(*forest.batch())
    assert plan is not None
    for row in forest.length:
        forest.grow(row)
    assert finder.find(*forest.batch()) is plan
    new = forest.enter()
    other = finder.find(*forest.batch())
    assert other is not None
    assert other.version > plan.version
    forest.leave(new)
    forest.enter()  # the same row, another request
    assert finder.find(*forest.batch()) is not other


def test_tails_that_have_grown_are_planned_anew():
    forest = Forest(4, 1)
    forest.paths = [forest.slots(150)]
    for _ in range(3):
        forest.enter()
    finder = SegmentFinder(forest.rows, CHEAP)
    plans = {id(finder.find(*forest.batch())) for _ in range(REFRESH + 2)}
    assert len(plans) == 2


def test_what_costs_more_than_it_saves_is_not_shared():
    forest = Forest(8, 1)
    forest.paths = [forest.slots(100)]
    forest.longest = 50
    for _ in range(4):
        forest.enter()
    members, kv_lens = forest.batch()
    assert SegmentFinder(forest.rows, SharingCost()).find(members, kv_lens) is None
    assert SegmentFinder(forest.rows, SharingCost(10, 10, 100)).find(members, kv_lens) is not None
    # 300 less 4 * 30 less 100 are saved
    finder = SegmentFinder(forest.rows, SharingCost(30, 100, 80))
    plan = finder.find(members, kv_lens)
    assert plan is not None
    assert plan.saved >= 80
    assert SegmentFinder(forest.rows, SharingCost(30, 100, 300)).find(members, kv_lens) is None


@pytest.mark.parametrize("count", [0, 1])
def test_nobody_to_share_with(count):
    forest = Forest(4, 1)
    for _ in range(count):
        forest.enter()
    members, kv_lens = forest.batch()
    assert SegmentFinder(forest.rows, CHEAP).find(members, kv_lens) is None


@pytest.mark.parametrize("overlap", [False, True])
def test_plans_of_a_running_scheduler_hold_on_the_device(overlap, make_world):
    """Readers of a segment have the same slots in the runner's own table, whoever comes, goes, is
    forced or retracted."""
    it = make_world(slots=800, rows=12, overlap=overlap, prompt_sizes=(64,))
    it.scheduler._segments = SegmentFinder(it.scheduler.rows, SharingCost(2, 2, 8))
    it.force = lambda output: [7, 8] if len(output) % 11 == 5 else []
    random = np.random.default_rng(5)
    stems = [random.integers(0, 50, int(n)).tolist() for n in (40, 90)]
    plans = 0
    launch = it.runner.launch

    def checked(batch):
        nonlocal plans
        result = launch(batch)
        if batch.tree is not None:
            plans += 1
            tables = it.runner.table[batch.rows]
            want = np.arange(int(batch.kv_lens.max())) < batch.kv_lens[:, None]
            assert (covered(batch.tree, batch.kv_lens) == want).all()
            for s, (start, end) in enumerate(zip(batch.tree.starts, batch.tree.ends)):
                first, last = batch.tree.reader_starts[s : s + 2]
                slots = tables[batch.tree.readers[first:last], start:end]
                assert (slots == slots[0]).all()
        return result

    it.runner.launch = checked
    for rid in range(60):
        stem = stems[rid % 2][: int(random.integers(1, 91))]
        own = random.integers(0, 50, int(random.integers(1, 9))).tolist()
        it.add(rid + 1, stem + own, int(random.integers(1, 40)))
        for _ in range(int(random.integers(0, 4))):
            it.step()
    it.run()
    assert len(it.done) == 60
    assert plans > 20
