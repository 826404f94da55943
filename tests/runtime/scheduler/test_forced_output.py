"""Output that was not sampled, and requests that stand aside for their grammar."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from ramet.runtime.protocol import ContextLengthError
from ramet.runtime.protocol.errors import QueueFullError
from ramet.runtime.protocol.messages import EngineSampling
from ramet.runtime.scheduler.request import Request


def follows(output):
    """After some tokens a few others must come."""
    return [output[-1], 7, 8, 9][: output[-1] % 5] if output[-1] % 3 else []


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_what_follows_forced_tokens_is_sampled_after_them(make_world, overlap, caching):
    world = make_world(overlap=overlap, caching=caching)
    world.force = follows
    prompts = {rid: [*range(rid, rid + 5 + 9 * rid)] for rid in range(6)}
    for rid, prompt in prompts.items():
        world.add(rid, prompt, 40)
    world.run()
    for rid, prompt in prompts.items():
        assert len(world.done[rid]) == 40
        world.check_forced(rid, prompt)
    assert sum(map(len, world.forced.values())) > 20
    assert world.memory.usage().held == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_forced_tokens_save_steps(make_world, overlap):
    def steps(force) -> int:
        world = make_world(overlap=overlap)
        world.force = force
        world.add(1, range(8), 60)
        count = 0
        while not world.scheduler.idle:
            world.step()
            count += 1
        return count

    saved = steps(None) - steps(lambda output: [1, 2, 3, 4])
    assert saved > 30 if not overlap else saved > 25


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_forced_tokens_under_pressure(make_world, overlap, seed):
    """Retractions, aborts and stops in the middle; every slot keeps one owner at every step."""
    draw = random.Random(seed)
    world = make_world(slots=160, rows=6, step_tokens=16, overlap=overlap)
    world.force = follows
    prompts = {}
    for rid in range(24):
        prompts[rid] = [draw.randrange(50) for _ in range(draw.randrange(1, 40))]
        world.add(rid, prompts[rid], draw.randrange(1, 60), stop_ids=(draw.randrange(50),))
    aborted = set()
    for _ in range(2000):
        if not world.step() and world.scheduler.idle:
            break
        if draw.random() < 0.02 and world.requests:
            rid = draw.choice(sorted(world.requests))
            world.abort(rid)
            aborted.add(rid)
    assert world.scheduler.idle
    assert world.scheduler.num_retracted > 0
    for rid in prompts.keys() - aborted - world.failed.keys():
        world.check_forced(rid, prompts[rid])
    assert world.memory.usage().held == 0


def test_without_kv_nothing_is_appended(make_world):
    world = make_world(slots=32, rows=1)
    world.add(1, range(20), 8)
    world.step()
    scheduler = world.scheduler
    row = world.requests[1].row
    before = scheduler.rows.known[row], scheduler.rows.epoch[row]
    assert not scheduler.append_forced(row, np.arange(30, dtype=np.int32))
    assert (scheduler.rows.known[row], scheduler.rows.epoch[row]) == before
    world.run()
    world.check(1, range(20), 8)


def test_one_row_does_not_hold_up_many_for_a_few_tokens(make_world):
    """Where prompts have steps of their own, a jump costs each other row one."""

    def jumped(rows: int, sizes: tuple[int, ...]) -> bool:
        world = make_world(rows=rows, prompt_sizes=sizes)
        for rid in range(rows):
            world.add(rid, range(rid, rid + 4), 50)
        for _ in range(12):
            world.step()
        row = world.requests[0].row
        return world.scheduler.append_forced(row, np.array([1, 2, 3], np.int32))

    assert jumped(2, (16, 64))
    assert not jumped(32, (16, 64))
    assert jumped(32, ())


def request(rid: int, arrival: float, length: int = 4) -> Request:
    sampling = EngineSampling(max_new_tokens=2)
    tokens = np.arange(rid, rid + length, dtype=np.int32)
    return Request(rid, b"c", sampling, tokens, length, arrival=arrival)


def test_who_stood_aside_takes_its_place_by_arrival(make_world):
    scheduler = make_world().scheduler
    now = time.monotonic()
    aside = request(2, now + 2)
    scheduler.add(request(1, now + 1))
    scheduler.add(aside, aside=True)
    scheduler.add(request(3, now + 3))
    scheduler.add(request(4, now + 4))
    assert [r.rid for r in scheduler.waiting] == [1, 3, 4]
    scheduler.bring_in(aside)
    assert [r.rid for r in scheduler.waiting] == [1, 2, 3, 4]
    assert not scheduler.aside


def test_who_stands_aside_holds_nothing_and_delays_nobody(make_world):
    world = make_world()
    scheduler = world.scheduler
    aside = request(1, 0.0)
    scheduler.add(aside, aside=True)
    assert scheduler.idle
    world.add(2, range(9), 5)
    world.run()
    world.check(2, range(9), 5)
    assert world.memory.usage().held == 0
    scheduler.remove(aside)
    assert not scheduler.aside


def test_who_stands_aside_counts_in_the_queue_and_must_fit(make_world):
    world = make_world(context=64)
    with pytest.raises(ContextLengthError):
        world.scheduler.add(request(1, 0.0, length=70), aside=True)
    object.__setattr__(world.scheduler.limits, "max_waiting", 2)
    world.scheduler.add(request(2, 0.0), aside=True)
    world.scheduler.add(request(3, 0.0))
    with pytest.raises(QueueFullError):
        world.scheduler.add(request(4, 0.0), aside=True)


@pytest.mark.parametrize("overlap", [False, True])
def test_what_goes_on_behind_forced_output_loses_no_slots(make_world, overlap):
    world = make_world(overlap=overlap)
    then = Request(2, b"c", EngineSampling(max_new_tokens=5), np.arange(3, dtype=np.int32), 3)
    leader = world.add(1, range(20), 12, then=then)
    while leader.row < 0 or world.scheduler.rows.known[leader.row] < 23:
        world.step()
    while world.flights:
        world.land(*world.flights.pop(0))
    scheduler = world.scheduler
    assert scheduler.append_forced(leader.row, np.array([1, 2, 3], np.int32))
    assert scheduler.go_on(leader, int(scheduler.rows.known[leader.row]))
    scheduler.assert_consistent()
    del world.requests[1]
    world.requests[2] = then
    world.run()
    assert len(world.done[2]) == 5
    assert world.memory.usage().held == 0
