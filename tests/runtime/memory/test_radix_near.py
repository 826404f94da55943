"""The tree searched from a node that was found before finds what it finds from its root."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from ramet.runtime.memory.eviction import ProgramAware
from ramet.runtime.memory.page_pool import PagePool
from ramet.runtime.memory.radix_node import Node
from ramet.runtime.memory.radix_tree import RadixTree

WORDS = st.lists(st.integers(0, 2), min_size=1, max_size=12)
ACTS = st.lists(
    st.tuples(st.sampled_from(["grow", "find", "at", "evict"]), WORDS, st.integers(0, 30)),
    max_size=40,
)


def tokens_of(words: list[int]) -> np.ndarray:
    return np.array(words, np.int32)


class World:
    """A tree, and what its nodes were when each text was last looked for."""

    def __init__(self) -> None:
        self.pool = PagePool(4096, 1)
        self.tree = RadixTree(self.pool, ProgramAware())
        self.near: dict[tuple[int, ...], Node] = {}

    def grow(self, tokens: np.ndarray, held: bool) -> None:
        """Insert, with ``held`` from a node that is locked meanwhile."""
        match = self.tree.match(tokens)
        self.tree.lock(match.node)
        new = self.pool.allocate(len(tokens) - match.length, match.length, -1)
        assert new is not None
        slots = np.concatenate((match.slots, new))
        start = (match.node, match.length) if held else None
        done = self.tree.insert(tokens, slots, b"", start)
        assert done.length == len(tokens)
        self.tree.unlock(match.node)


def state(tree: RadixTree) -> list[tuple[object, ...]]:
    """All that eviction looks at, by path."""
    return sorted(
        (tuple(np.concatenate([n.tokens for n in [*node.path()][::-1]]).tolist()),
         len(node.tokens), node.hits, node.last_use, node.since, node.returns)
        for node in tree.nodes()
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(ACTS)
def test_what_is_near_changes_nothing_but_the_time(acts: list[tuple[str, list[int], int]]) -> None:
    """Two trees, of which one is always searched from its root, stay alike."""
    plain, quick = World(), World()
    for act, words, count in acts:
        tokens, key = tokens_of(words), tuple(words)
        near = next(
            (n for k, n in quick.near.items() if k == key[: len(k)] or k[: len(key)] == key), None
        )
        if act == "grow":
            plain.grow(tokens, held=False)
            quick.grow(tokens, held=True)
        elif act == "find":
            node, length = quick.tree.reach(tokens, b"", near)
            assert length == plain.tree.peek(tokens)
            found, again = plain.tree.match(tokens), quick.tree.match(tokens, b"", near)
            assert found.slots.tolist() == again.slots.tolist()
            assert again.node.depth() == again.length == length
            if node is not None:
                quick.near[key] = again.node
        elif act == "at":
            node = quick.tree.at(tokens, b"", near)
            assert node.depth() == plain.tree.at(tokens).depth()
            quick.near[key] = node
        else:
            assert plain.tree.evict(count) == quick.tree.evict(count)
        assert state(plain.tree) == state(quick.tree)
        quick.tree.assert_consistent()
        quick.pool.assert_consistent()


def test_what_was_evicted_is_looked_for_from_the_root() -> None:
    world = World()
    world.grow(tokens_of([0, 1, 2, 0]), held=True)
    near = world.tree.at(tokens_of([0, 1, 2, 0]))
    world.tree.clear()
    assert world.tree.reach(tokens_of([0, 1]), b"", near)[1] == 0
    world.grow(tokens_of([0, 1]), held=True)
    assert world.tree.reach(tokens_of([0, 1, 2, 0]), b"", near)[1] == 2
    assert world.tree.match(tokens_of([0, 1, 2, 0]), b"", near).length == 2


def test_a_node_whose_end_was_cut_leads_as_far_as_it_does_now() -> None:
    world = World()
    world.grow(tokens_of([0, 1, 2, 0, 1, 1]), held=True)
    near = world.tree.at(tokens_of([0, 1, 2, 0, 1, 1]))
    world.tree.evict(2)
    assert world.tree.reach(tokens_of([0, 1, 2, 0, 1, 1]), b"", near)[1] == 4
    world.grow(tokens_of([0, 1, 2, 0, 1, 1, 2]), held=True)
    assert world.tree.match(tokens_of([0, 1, 2, 0, 1, 1]), b"", near).length == 6
