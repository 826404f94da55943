"""Pool and tree against a naive model: a dictionary from every cached prefix to its slot."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from ramet.runtime.memory.kv_memory import KVMemory
from ramet.runtime.memory.radix_node import common_prefix

TOTAL = 96
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=40)
namespaces = st.sampled_from([b"", b"tenant"])


class Held:
    """One request's view: its tokens, the slots of those computed, what is shared."""

    def __init__(self, tokens, namespace, node, slots, shared):
        self.tokens, self.namespace, self.node = tokens, namespace, node
        self.slots, self.shared = slots, shared


class MemoryMachine(RuleBasedStateMachine):
    """Content of slots is simulated: each holds (namespace, prefix). Whatever the tree gives out
    must lead to exactly the prefix asked for."""

    def __init__(self):
        super().__init__()
        self.memory = KVMemory(TOTAL, 4)
        self.content = {}
        self.held: list[Held] = []
        self.freed_by_flush = 0

    def _write(self, held: Held, start: int) -> None:
        for position in range(start, len(held.slots)):
            key = (held.namespace, tuple(held.tokens[: position + 1]))
            self.content[int(held.slots[position])] = key

    def _check(self, tokens, namespace, slots) -> None:
        for position, slot in enumerate(slots.tolist()):
            assert self.content[slot] == (namespace, tuple(tokens[: position + 1]))

    @rule(tokens=prompts, namespace=namespaces)
    def admit(self, tokens, namespace):
        array = np.array(tokens, np.int32)
        cached = self.memory.peek(array, namespace)
        match = self.memory.hold(array[:-1], namespace)
        assert match.length == min(cached, len(tokens) - 1)
        self._check(tokens, namespace, match.slots)
        need = len(tokens) - match.length
        after = int(match.slots[-1]) if match.length else -1
        room = self.memory.available
        slots = self.memory.allocate(need, match.length, after)
        assert (slots is None) == (need > room)
        if slots is None:
            self.memory.release(match.node, np.empty(0, np.int32))
            return
        assert len(set(slots.tolist())) == need
        held = Held(tokens, namespace, match.node, np.concatenate((match.slots, slots)), 0)
        held.shared = match.length
        self._write(held, match.length)
        self.held.append(held)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def grow_all(self, data):
        tokens = [data.draw(st.integers(0, 2)) for _ in self.held]
        last = np.array([h.slots[-1] for h in self.held], np.int32)
        positions = np.array([len(h.slots) for h in self.held], np.int32)
        room = self.memory.available
        slots = self.memory.allocate_next(last, positions)
        assert (slots is None) == (len(self.held) > room)
        if slots is None:
            return
        assert len(set(slots.tolist())) == len(slots)
        for held, token, slot in zip(self.held, tokens, slots):
            held.tokens = [*held.tokens, token]
            held.slots = np.append(held.slots, slot).astype(np.int32)
            self._write(held, len(held.slots) - 1)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data):
        held = data.draw(st.sampled_from(self.held))
        end = data.draw(st.integers(max(held.shared, 1), len(held.slots)))
        match = self.memory.share(
            held.node,
            np.array(held.tokens[:end], np.int32),
            held.slots[:end],
            held.shared,
            held.namespace,
        )
        held.node, held.shared = match.node, end
        held.slots = np.concatenate((match.slots, held.slots[end:]))
        self._check(held.tokens, held.namespace, held.slots)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data):
        held = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self._check(held.tokens, held.namespace, held.slots)
        self.memory.release(held.node, held.slots[held.shared :])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def pin_and_unpin(self, data):
        node = data.draw(st.sampled_from(self.held)).node
        self.memory.tree.pin(node)
        self.memory.tree.unpin(node)

    @rule(count=st.integers(1, TOTAL))
    def evict(self, count):
        before = self.memory.tree.num_evictable
        freed = self.memory.tree.evict(count)
        assert freed >= min(count, before)

    @rule()
    def flush(self):
        evictable = self.memory.tree.num_evictable
        assert self.memory.flush() == evictable
        assert self.memory.tree.num_evictable == 0

    @invariant()
    def every_slot_has_one_owner(self):
        self.memory.assert_consistent(h.slots[h.shared :] for h in self.held)
        usage = self.memory.usage()
        assert usage.free + usage.evictable + usage.held == usage.total == TOTAL
        for held in self.held:
            self._check(held.tokens, held.namespace, held.slots)


MemoryMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestMemoryMachine = MemoryMachine.TestCase


def _fill(memory: KVMemory, tokens) -> None:
    array = np.array(tokens, np.int32)
    match = memory.hold(array, b"")
    after = int(match.slots[-1]) if match.length else -1
    slots = memory.allocate(len(array) - match.length, match.length, after)
    assert slots is not None
    both = np.concatenate((match.slots, slots))
    node = memory.share(match.node, array, both, match.length, b"").node
    memory.release(node, np.empty(0, np.int32))


def test_lru_evicts_what_was_not_used_longest():
    memory = KVMemory(64, 16)
    for first in range(4):
        _fill(memory, [first] * 16)
    memory.peek(np.array([0] * 16, np.int32), b"")
    memory.tree.match(np.array([0] * 16, np.int32))
    _fill(memory, [9] * 15)
    cached = [memory.peek(np.array([f] * 16, np.int32), b"") for f in range(4)]
    assert cached == [16, 0, 16, 16]


def test_lfu_evicts_what_was_matched_least():
    memory = KVMemory(64, 16, eviction="lfu")
    for first in range(4):
        _fill(memory, [first] * 16)
    for first in (1, 2, 3):
        memory.tree.match(np.array([first] * 16, np.int32))
    _fill(memory, [9] * 15)
    assert memory.peek(np.array([0] * 16, np.int32), b"") == 0


def test_program_eviction_takes_unpinned_first():
    memory = KVMemory(64, 16, eviction="program")
    for first in range(4):
        _fill(memory, [first] * 16)
    memory.tree.pin(memory.tree.match(np.array([0] * 16, np.int32)).node)
    for first in (1, 2, 3):
        memory.tree.match(np.array([first] * 16, np.int32))
    _fill(memory, [9] * 15)
    assert memory.peek(np.array([0] * 16, np.int32), b"") == 16
    assert memory.peek(np.array([1] * 16, np.int32), b"") == 0


def test_pins_yield_when_nothing_else_is_left():
    memory = KVMemory(32, 16, eviction="program")
    _fill(memory, [0] * 32)
    node = memory.tree.match(np.array([0] * 32, np.int32)).node
    memory.tree.pin(node)
    _fill(memory, [1] * 32)
    assert memory.peek(np.array([0] * 32, np.int32), b"") == 0
    memory.tree.unpin(node)
    memory.assert_consistent([])


def test_namespaces_share_nothing():
    memory = KVMemory(64, 16)
    _fill(memory, [1] * 16)
    assert memory.peek(np.array([1] * 16, np.int32), b"other") == 0
    assert memory.hold(np.array([1] * 16, np.int32), b"other").length == 0


def test_namespaces_that_hold_nothing_are_forgotten():
    """One salt a user must not cost memory for ever; a held namespace stays what it was."""
    memory = KVMemory(64, 16)
    tokens = np.arange(4, dtype=np.int32)
    held = memory.hold(tokens, b"held")
    kept = memory.allocate(4, 0, -1)
    kept = memory.share(held.node, tokens, kept, 0, b"held")
    for i in range(5000):
        name = i.to_bytes(4, "little")
        match = memory.hold(tokens, name)
        slots = memory.allocate(4, 0, -1)
        match = memory.share(match.node, tokens, slots, 0, name)
        memory.release(match.node, np.empty(0, np.int32))
    assert len(memory.tree._roots) < 2500
    assert memory.peek(tokens, b"held") == 4
    memory.assert_consistent([])
    memory.release(kept.node, np.empty(0, np.int32))
    memory.flush()
    assert not memory.tree._roots
    assert memory.usage().free == memory.total


def test_what_is_locked_is_never_evicted():
    memory = KVMemory(32, 16)
    _fill(memory, [1] * 16)
    match = memory.hold(np.array([1] * 16, np.int32), b"")
    assert memory.allocate(17, 0, -1) is None
    assert match.length == 16
    assert memory.peek(np.array([1] * 16, np.int32), b"") == 16


def test_sizes_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="page_size"):
        KVMemory(64, 0)
    with pytest.raises(ValueError, match="do not fill"):
        KVMemory(8, 16)


@pytest.mark.parametrize(
    ("a", "b", "n"), [([], [], 0), ([1], [], 0), ([1, 2], [1, 2], 2), ([1, 2, 3], [1, 3], 1)]
)
def test_common_prefix(a, b, n):
    assert common_prefix(np.array(a, np.int32), np.array(b, np.int32)) == n
