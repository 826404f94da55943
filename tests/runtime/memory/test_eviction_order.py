"""What goes first when room is needed, as time passes and as more becomes known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ramet.runtime.memory.eviction import POLICIES, ProgramAware
from ramet.runtime.memory.kv_memory import KVMemory
from ramet.runtime.memory.return_times import ReturnTimes, start_of, stretch_of

NONE = np.empty(0, np.int32)


def prompt(*parts):
    """Each part is a name; its tokens are sixteen of its own."""
    return np.concatenate([np.arange(16, dtype=np.int32) + 16 * part for part in parts])


def compute(memory, tokens):
    """As a request does that runs alone; returns the node at its end."""
    match = memory.hold(tokens, b"")
    slots = memory.allocate(len(tokens) - match.length, match.length, -1)
    shared = memory.share(match.node, tokens, np.concatenate((match.slots, slots)),
                          match.length, b"")  # fmt: skip
    memory.release(shared.node, NONE)
    return shared.node


def lost(memory, prompts, count=16):
    """Which of the prompts is shorter after so much was evicted."""
    before = [memory.peek(p, b"") for p in prompts]
    memory.tree.evict(count)
    return [i for i, p in enumerate(prompts) if memory.peek(p, b"") < before[i]]


def test_stretches_cover_all_ages_in_order():
    ages = [0, 1, 2, 3, 4, 5, 6, 7, 10, 100, 1000, 10**6]
    for age in ages:
        stretch = stretch_of(age)
        assert start_of(stretch) <= age < start_of(stretch + 1) or age == start_of(stretch)
    assert [stretch_of(a) for a in ages] == sorted(stretch_of(a) for a in ages)
    assert stretch_of(2**80) == stretch_of(2**90)


def test_rates_are_learned_from_what_was_read():
    times = ReturnTimes(2, lambda _kind, age: 1 / (64 + age))
    before = times.level(0, 10)
    for _ in range(600):
        times.spell(0, 0, 200, read=True)  # nobody comes before, all come then
        times.spell(1, 0, 200, read=False)
    assert times.level(0, 10) < before
    assert times.level(0, 200) > times.level(0, 10) + 8 * 4
    assert times.level(1, 200) < times.level(0, 200) - 8 * 4


def test_what_was_seen_long_ago_counts_less():
    times = ReturnTimes(1, lambda _kind, age: 1 / (64 + age))
    for _ in range(4096):
        times.spell(0, 0, 100, read=True)
    often = times.level(0, 100)
    for _ in range(4 * 4096):
        times.spell(0, 0, 100, read=False)
    assert times.level(0, 100) < often - 8


def test_the_announced_goes_after_the_kept_and_the_queued_last():
    memory = KVMemory(16 * 64, 16, eviction="program")
    prompts = [prompt(i) for i in range(1, 7)]
    nodes = [compute(memory, p) for p in prompts]
    for i, ahead in ((1, 5), (2, 1), (3, 0)):
        memory.tree.pin(nodes[i], ahead=ahead)
    memory.tree.pin(nodes[0], awaited=True)
    order = []
    while memory.usage().evictable:
        order += lost(memory, prompts)
    assert set(order[:2]) == {4, 5}
    # Kept, then of a program with one request to come, then of one with five, then the queue's.
    assert order[2:] == [3, 2, 1, 0]


def test_of_programs_alike_the_one_that_was_read_last_goes_first():
    memory = KVMemory(16 * 64, 16, eviction="program")
    prompts = [prompt(i) for i in range(1, 4)]
    for p in prompts:
        memory.tree.pin(compute(memory, p), ahead=2)
    assert lost(memory, prompts) == [2]


def test_more_streams_go_after_fewer_whatever_is_to_come():
    memory = KVMemory(16 * 64, 16, eviction="program")
    prompts = [prompt(1), prompt(2)]
    one, two = (compute(memory, p) for p in prompts)
    memory.tree.pin(one, ahead=3)
    memory.tree.pin(one, ahead=3)
    memory.tree.pin(two, ahead=9)
    assert lost(memory, prompts) == [1]


def test_what_others_come_for_outlives_what_nobody_came_for():
    memory = KVMemory(16 * 4096, 16, eviction="program")
    often = prompt(1)
    compute(memory, often)
    for i in range(2, 1000):
        compute(memory, prompt(i))
        if i % 20 == 0:
            compute(memory, often)
    # The last to come is that of i = 980; what came after it is newer, and goes before it.
    late = [prompt(i) for i in range(985, 995)]
    while all(memory.peek(p, b"") for p in late):
        memory.tree.evict(16)
    assert memory.peek(often, b"") == 16


def test_kept_ends_of_which_none_is_ever_read_again_go_early():
    """Streams that come back do so soon; those that do not are kept till their program ends."""
    memory = KVMemory(16 * 4096, 16, eviction="program")
    for i in range(2, 900):
        node = compute(memory, prompt(i))
        memory.tree.pin(node)
        if i % 2 == 0:
            compute(memory, np.concatenate((prompt(i), prompt(2000 + i))))
    stale, fresh = prompt(401), prompt(899)
    while memory.peek(stale, b"") and memory.peek(fresh, b""):
        memory.tree.evict(16)
    assert not memory.peek(stale, b"")


@pytest.mark.parametrize("eviction", sorted(POLICIES))
def test_the_order_does_not_grow_with_what_happens_to_few_leaves(eviction):
    memory = KVMemory(16 * 64, 16, eviction=eviction)
    order = memory.tree._order
    nodes = [compute(memory, prompt(i)) for i in range(1, 40)]
    for turn in range(200):
        for node in nodes:
            memory.tree.pin(node, ahead=turn % 3)
            memory.tree.lock(node)
            memory.tree.unlock(node)
            memory.tree.unpin(node)
    assert len(order._heap) + len(order._reviews) <= 65 + 4 * 40
    memory.tree.assert_consistent()
    assert memory.tree.evict(16 * 39) == 16 * 39


@pytest.mark.parametrize("eviction", sorted(POLICIES))
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_what_goes_is_the_first_of_all_leaves(eviction, data):
    """Whatever was offered when: the heap and the reviews find what looking at all leaves finds.
    (What is learned meanwhile changes keys of leaves that nobody offers, so nothing is learned.)"""
    memory = KVMemory(16 * 40, 16, eviction=eviction)
    tree = memory.tree
    policy = tree._policy
    if isinstance(policy, ProgramAware):
        policy._times._learn = lambda: None
    pins = []
    numbers = st.integers(0, 5)
    for _ in range(data.draw(st.integers(5, 60))):
        what = data.draw(st.sampled_from(("run", "run", "pin", "await", "unpin", "look", "evict")))
        tokens = prompt(*data.draw(st.lists(numbers, min_size=1, max_size=3)))
        if what == "run":
            compute(memory, tokens)
        elif what in ("pin", "await"):
            node, awaited = tree.at(tokens), what == "await"
            ahead = 0 if awaited else data.draw(st.integers(0, 3))
            tree.pin(node, awaited=awaited, **({} if awaited else {"ahead": ahead}))
            pins.append((node, awaited))
        elif what == "unpin" and pins:
            node, awaited = pins.pop(data.draw(st.integers(0, len(pins) - 1)))
            if node.parent is not None and node.pins:
                tree.unpin(node, awaited=awaited)
        elif what == "look":
            for _ in range(data.draw(st.integers(1, 300))):
                tree.match(prompt(9999))
        elif what == "evict" and memory.usage().evictable:
            keys = {}
            for node in tree.nodes():
                if not node.children and not node.lock:
                    keys[id(node)] = policy.key(node, tree.clock), node.serial
            first = min(keys, key=keys.__getitem__)
            gone = []
            tree.evict(1, lambda node, _, gone=gone: gone.append(id(node)))
            assert gone[0] == first
        tree.assert_consistent()
