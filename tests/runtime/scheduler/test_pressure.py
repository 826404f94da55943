"""Look-ahead under pressure: nothing changes what comes out, and nothing stands still."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from ramet.runtime.engine.handles import Handles
from ramet.runtime.memory.eviction import POLICIES as EVICTIONS
from ramet.runtime.scheduler.policies import POLICIES

STEMS = ([*range(30)], [*range(30, 50)], [7] * 25)


def prompts(count):
    dice = np.random.default_rng(5)
    for rid in range(count):
        stem = STEMS[int(dice.integers(0, 3))]
        yield rid, [*stem, *dice.integers(0, 50, int(dice.integers(1, 30))).tolist()]


def submit(world, rid, prompt, program, remaining):
    world.add(rid, prompt, 6, program=program, remaining=remaining)


@pytest.mark.parametrize(("policy", "eviction"), [*itertools.product(POLICIES, EVICTIONS)])
@pytest.mark.parametrize("slots", [112, 2048])
def test_outputs_are_the_same_with_every_policy_and_eviction(make_world, policy, eviction, slots):
    world = make_world(slots=slots, rows=4, policy=policy, eviction=eviction)
    all_prompts = dict(prompts(24))
    for rid, prompt in all_prompts.items():
        submit(world, rid, prompt, rid % 5, rid % 3)
        if rid % 3 == 0:
            world.step()
    world.run()
    for rid, prompt in all_prompts.items():
        world.check(rid, prompt, 6)
    assert all(node.pins == node.awaited == 0 for node in world.memory.tree.nodes())


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_all_finish_when_every_slot_is_wished_for(make_world, policy):
    """Live programs wish for more than there is, those in the queue too; new ones still run."""
    world = make_world(slots=160, rows=3, policy=policy, eviction="program")
    handles = Handles(world.memory.tree)
    for rid in range(40):
        prompt = [rid % 50, *range(rid % 7, rid % 7 + 39)]
        submit(world, rid, prompt, rid, 5)
        handles.mark(rid, np.array(prompt, np.int32), b"")
    while not world.scheduler.idle:
        world.step()
        for rid in world.done:
            handles.renew(rid)
    assert len(world.done) == 40
    assert not world.failed
    usage = world.memory.usage()
    pinned = sum(len(node.slots) for node in world.memory.tree.nodes() if node.pins)
    assert pinned >= 0.8 * usage.total, "the pool was full of wishes"
    handles.clear()
    assert all(node.pins == 0 for node in world.memory.tree.nodes())


def test_what_the_queue_will_read_is_evicted_last_and_its_head_after_its_end(make_world):
    world = make_world(slots=160, rows=1, step_tokens=512, eviction="program")
    for rid, start in enumerate((0, 10, 20)):
        world.add(rid, [start, *range(start, start + 40)], 1)
        world.run()
    world.add(9, [49] * 10, 40)
    world.step()
    world.add(10, [0, *range(40), 5], 1)
    world.add(11, [20, *range(20, 60), 5], 1)
    cached = [
        lambda start=start: world.memory.peek(
            np.array([start, *range(start, start + 40)], np.int32), b""
        )
        for start in (0, 10, 20)
    ]
    world.memory.tree.evict(41)
    assert [look() for look in cached] == [41, 0, 41]
    world.memory.tree.evict(41)
    assert cached[0]() == 41, "what the head of the queue reads"
    assert cached[2]() == 0
    world.run()
    assert len(world.done) == 6


def test_a_leaf_is_cut_and_not_taken_whole(make_world):
    world = make_world(slots=512, page=16, step_tokens=256)
    tokens = np.arange(200, dtype=np.int32)
    world.add(0, tokens % 50, 1)
    world.run()
    assert world.memory.tree.evict(20) == 32
    assert world.memory.peek(tokens % 50, b"") == 168
    world.memory.assert_consistent([])
    world.add(1, tokens % 50, 1)
    world.run()
    world.check(1, tokens % 50, 1)
