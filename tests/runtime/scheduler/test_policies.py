"""In which order waiting requests are taken."""

from __future__ import annotations

import numpy as np
import pytest
from ramet.runtime.protocol.messages import EngineSampling
from ramet.runtime.scheduler.policies import POLICIES, aged_first
from ramet.runtime.scheduler.request import Request
from ramet.runtime.scheduler.waiting import Waiting


def request(rid, tokens=(1,), *, program=0, arrival=0.0, retractions=0):
    ids = np.array(tokens, np.int32)
    return Request(rid, b"c", EngineSampling(max_new_tokens=1), ids, len(ids), program=program,
                   arrival=arrival, retractions=retractions)  # fmt: skip


def rids(requests):
    return [r.rid for r in requests]


def test_the_longest_cached_prefix_goes_first(make_world):
    world = make_world()
    world.add(0, range(40), 1)
    world.run()
    waiting = [request(1, [7, 8]), request(2, range(20)), request(3, range(30)), request(4, [9])]
    assert rids(POLICIES["lpm"]().order(waiting, world.memory)) == [3, 2, 1, 4]


def test_neighbours_in_the_tree_follow_each_other(make_world):
    waiting = [request(1, [5, 1]), request(2, [300]), request(3, [5]), request(4, [2, 9])]
    assert rids(POLICIES["dfs"]().order(waiting, make_world().memory)) == [4, 3, 1, 2]


def test_an_older_program_goes_first_even_when_its_first_request_is_done(make_world):
    policy, memory = POLICIES["program"](), make_world().memory
    policy.order([request(1, program=1, arrival=1.0)], memory)
    waiting = [
        request(2, program=2, arrival=2.0),
        request(3, arrival=2.5),
        request(4, program=1, arrival=3.0),
        request(5, arrival=4.0),
    ]
    assert rids(policy.order(waiting, memory)) == [4, 2, 3, 5]


def test_who_waited_too_long_goes_before_who_is_preferred():
    waiting = [request(1, arrival=0.0), request(2, arrival=1.0), request(3, arrival=8.0)]
    preferred = [waiting[2], waiting[1], waiting[0]]
    assert rids(aged_first(preferred, waiting, 4.0, 5.0)) == [3, 2, 1]
    assert rids(aged_first(preferred, waiting, 5.5, 5.0)) == [1, 3, 2]
    assert rids(aged_first(preferred, waiting, 9.0, 5.0)) == [1, 2, 3]


def test_a_young_retracted_request_does_not_hide_who_waited_too_long():
    waiting = [request(9, arrival=7.0, retractions=1), request(1), request(2, arrival=8.0)]
    assert rids(aged_first([waiting[2], waiting[0], waiting[1]], waiting, 9.0, 5.0)) == [1, 2, 9]


@pytest.mark.parametrize("policy", ["lpm", "dfs"])
def test_ageing_ends_a_starvation(make_world, policy):
    """Newcomers that a policy prefers keep coming; the one it does not is taken all the same."""
    world = make_world(policy=policy, rows=1)
    world.add(0, range(30), 1)
    world.run()
    starved = world.add(1, range(40, 60), 1)
    for rid in range(2, 12):
        world.add(rid, [*range(30), rid], 1)
        if rid == 6:
            starved.arrival -= 60.0
        world.step()
        assert (1 in world.done) == (rid >= 6)


def test_the_queue_is_not_ordered_when_no_row_is_free(make_world):
    world = make_world(policy="lpm", rows=1)
    world.add(0, range(30), 20)
    world.step()
    world.add(1, range(40, 60), 1)
    asked = []
    world.scheduler._policy.order = lambda waiting, memory: asked.append(1) or waiting
    for _ in range(5):
        world.step()
    assert not asked
    world.run()
    assert {0, 1} <= set(world.done)


def test_the_program_with_least_left_goes_first(make_world):
    policy, memory = POLICIES["program"](), make_world().memory
    long = [request(1, program=1, arrival=1.0), request(2, program=1, arrival=1.0)]
    long[0].remaining, long[1].remaining = 8, 7
    short = [request(3, program=2, arrival=2.0), request(4, program=3, arrival=3.0)]
    short[0].remaining, short[1].remaining = 3, 2
    waiting = [*long, *short]
    for serial, each in enumerate(waiting, 1):
        each.serial = serial
    assert rids(policy.order(waiting, memory)) == [4, 3, 1, 2]
    last = request(5, program=1, arrival=9.0)  # what is left of the long one is known anew
    last.serial = 5
    assert rids(policy.order([*short, last], memory)) == [5, 4, 3]


def test_requests_of_no_program_and_of_other_connections_are_apart(make_world):
    policy, memory = POLICIES["program"](), make_world().memory
    mine = [request(rid, program=1, arrival=float(rid)) for rid in (1, 2, 3)]
    other = request(4, program=1, arrival=4.0)
    other.connection = b"other"
    alone = [request(5, arrival=5.0), request(6, arrival=6.0)]
    assert rids(policy.order([*mine, other, *alone], memory)) == [4, 5, 6, 1, 2, 3]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_nobody_is_overtaken_for_longer_than_the_bound(make_world, monkeypatch, policy):
    """A stream of newcomers, of every kind that a policy may like, comes faster than it is served:
    whoever has waited for the bound goes before all that came later."""
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    world = make_world(policy=policy, rows=2)
    dice = np.random.default_rng(3)
    bound, admitted, waiting = world.scheduler.limits.ageing, {}, {}
    for rid in range(150):
        stem = dice.integers(0, 3) * 10
        program = {"program": rid % 7, "remaining": int(dice.integers(0, 9))}
        added = world.add(rid, [*range(stem, stem + 20), rid % 50], 1, **program)
        waiting[rid] = added
        clock[0] += 0.4
        if rid % 2:
            world.step()
        for each in [r for r in waiting.values() if r.admitted]:
            admitted[each.rid] = waiting.pop(each.rid)
    world.run()
    assert len(world.done) == 150
    for late in admitted.values():
        for early in admitted.values():
            if early.admitted > late.admitted and late.arrival > early.arrival:
                assert late.admitted - early.arrival <= bound


def test_the_queue_knows_the_requests_of_each_program():
    waiting = Waiting()
    mine = [request(rid, program=1, arrival=float(rid)) for rid in (1, 2, 3)]
    alone = [request(rid, arrival=float(rid)) for rid in (4, 5)]
    for one in (*mine, *alone):
        waiting.append(one)
    policy, memory = POLICIES["program"](), None
    assert rids(policy.order(waiting, memory)) == rids(policy.order([*waiting], memory))
    waiting.remove(mine[1])
    waiting.insert(0, mine[1])
    waiting.remove(alone[0])
    assert rids(policy.order(waiting, memory)) == [5, 1, 2, 3]
    for one in [*waiting]:
        waiting.remove(one)
    assert not waiting.by_program
