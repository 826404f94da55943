"""Where prompts leave the tree, and the tree page by page."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ramet.runtime.engine.look import MOST_NODES, look
from ramet.runtime.memory.kv_memory import KVMemory
from ramet.runtime.memory.tree_view import AHEAD_TOKENS, HEAD_TOKENS, divergence, elsewhere, page
from ramet.runtime.protocol.messages import Ask

DIGITS = st.integers(0, 3)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


@pytest.fixture
def memory() -> KVMemory:
    return KVMemory(4096, 1)


def cache(memory: KVMemory, tokens, namespace: bytes = b"") -> None:
    """Leave a prompt in the tree, as a request that has ended does."""
    tokens = np.asarray(tokens, np.int32)
    held = memory.hold(tokens, namespace)
    slots = memory.allocate(len(tokens) - held.length, held.length, -1)
    assert slots is not None
    slots = np.concatenate((held.slots, slots))
    match = memory.share(held.node, tokens, slots, held.length, namespace)
    memory.release(match.node, slots[:0])


def facts(memory: KVMemory) -> list[tuple]:
    return [(n.serial, len(n.tokens), n.hits, n.last_use, n.lock) for n in memory.tree.nodes()]


def test_an_empty_tree_has_nothing_of_it(memory):
    found = memory.explain(ids(1, 2), b"")
    assert (found.index, found.reason, found.neighbour, found.branches) == (0, "empty", (), 0)
    assert not memory.tree.roots, "asking made a namespace"


def test_without_caching_it_says_so():
    assert KVMemory(64, 1, caching=False).explain(ids(1), b"").reason == "off"


def test_a_prompt_that_leaves_in_the_middle_of_an_edge(memory):
    cache(memory, [1, 2, 3, 4, 5, 6])
    before = facts(memory)
    found = divergence(memory.tree, ids(1, 2, 3, 9, 5, 6))
    assert (found.index, found.reason, found.branches) == (3, "differs", 1)
    assert found.neighbour == (4, 5, 6)
    assert facts(memory) == before, "looking changed the tree"


def test_a_prompt_that_is_all_there_and_one_that_goes_beyond(memory):
    cache(memory, [1, 2, 3, 4])
    whole = divergence(memory.tree, ids(1, 2, 3, 4))
    assert (whole.index, whole.reason, whole.neighbour) == (4, "whole", ())
    inside = divergence(memory.tree, ids(1, 2))
    assert (inside.index, inside.reason, inside.neighbour) == (2, "whole", (3, 4))
    beyond = divergence(memory.tree, ids(1, 2, 3, 4, 5))
    assert (beyond.index, beyond.reason, beyond.neighbour) == (4, "ends", ())


def test_of_several_ways_on_the_most_alike_is_the_neighbour(memory):
    cache(memory, [1, 2, 10, 20, 21, 22])
    cache(memory, [1, 2, 11, 30, 31, 32])
    cache(memory, [1, 2, 12, 40, 41, 42])
    found = divergence(memory.tree, ids(1, 2, 99, 30, 31, 32))
    assert (found.index, found.branches) == (2, 3)
    assert found.neighbour == (11, 30, 31, 32)
    newest = divergence(memory.tree, ids(1, 2, 99, 98))
    assert newest.neighbour[0] == 12


def test_a_neighbour_is_followed_over_edges_and_cut(memory):
    long = [1, *range(100, 100 + 2 * AHEAD_TOKENS)]
    cache(memory, long)
    cache(memory, [*long[:5], 7])  # cuts the edge in two
    found = divergence(memory.tree, ids(1, 50))
    assert found.neighbour[:3] == (100, 101, 102)
    assert len(found.neighbour) <= AHEAD_TOKENS
    cache(memory, long)
    assert divergence(memory.tree, ids(1, 50)).neighbour == tuple(long[1 : 1 + AHEAD_TOKENS])


def test_hits_are_those_of_the_neighbour(memory):
    cache(memory, [1, 2, 3])
    for _ in range(3):
        memory.release(memory.hold(ids(1, 2, 3), b"").node, ids())
    assert divergence(memory.tree, ids(1, 2, 4)).hits >= 3


def test_another_namespace_is_seen_only_when_asked_for(memory):
    cache(memory, [1, 2, 3, 4], b"theirs")
    cache(memory, [1, 9], b"mine")
    mine = memory.explain(ids(1, 2, 3, 4), b"mine")
    assert (mine.index, mine.neighbour) == (1, (9,))
    assert memory.explain(ids(1, 2, 3, 4), b"new").reason == "empty"
    other = elsewhere(memory.tree, ids(1, 2, 3, 5), b"mine")
    assert other is not None
    assert other[0] == b"theirs"
    assert (other[1].index, other[1].neighbour) == (3, (4,))
    assert elsewhere(memory.tree, ids(8), b"mine") is None


def test_the_engine_looks_elsewhere_only_when_told(memory):
    cache(memory, [1, 2, 3, 4], b"theirs")
    asked = {"id": 1, "op": "explain", "ids": ids(1, 2, 3).tobytes(), "namespace": b"mine"}
    data, error = look(memory, Ask(**asked))
    assert error is None
    assert data == {"here": {"index": 0, "reason": "empty"}}
    data, _ = look(memory, Ask(**asked, everywhere=True))
    assert data["namespace"] == b"theirs"
    assert data["other"]["index"] == 3


@pytest.mark.parametrize("limit", [0, -1, MOST_NODES + 1])
def test_a_page_has_bounds(memory, limit):
    data, error = look(memory, Ask(id=1, op="tree", limit=limit))
    assert not data
    assert error is not None
    assert f"[1, {MOST_NODES}]" in error.message


def test_bytes_that_are_no_tokens_are_refused(memory):
    _, error = look(memory, Ask(id=1, op="explain", ids=b"abc"))
    assert error is not None
    assert "int32" in error.message


def test_a_page_shows_what_a_node_is(memory):
    cache(memory, range(60))
    cache(memory, [*range(20), 99], b"other")
    held = memory.hold(np.arange(60, dtype=np.int32), b"")
    (first, second) = page(memory.tree, (), 10).nodes
    assert (first.namespace, first.start, first.size, first.parent) == (b"", 0, 60, None)
    assert first.head == tuple(range(HEAD_TOKENS))
    assert (first.locks, first.hits, first.children) == (1, 1, 0)
    assert (second.namespace, second.size, second.locks) == (b"other", 21, 0)
    memory.release(held.node, ids())


def pages(memory: KVMemory, limit: int) -> list:
    """All nodes, page by page."""
    shown, after = [], ()
    while True:
        found = page(memory.tree, after, limit)
        assert len(found.nodes) <= limit
        assert found.next != after, "the same page again and again"
        shown += found.nodes
        if found.next is None:
            return shown
        after = found.next


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), min_size=1, max_size=8), st.sampled_from([b"", b"x"])
        ),
        max_size=20,
    ),
    st.integers(1, 7),
)
def test_pages_join_to_the_whole_tree(prompts, limit):
    memory = KVMemory(4096, 1)
    for tokens, namespace in prompts:
        cache(memory, tokens, namespace)
    shown = pages(memory, limit)
    assert [n.id for n in shown] == [n.id for n in pages(memory, 1000)]
    assert {n.id for n in shown} == {n.serial for n in memory.tree.nodes()}
    assert len(shown) == len({n.id for n in shown})
    ends = {n.id: n.start + n.size for n in shown}
    for place, node in enumerate(shown):
        assert node.start == (0 if node.parent is None else ends[node.parent])
        if node.parent is not None:
            assert node.parent in {n.id for n in shown[:place]}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=12),
    st.lists(st.integers(0, 2), max_size=10),
)
def test_the_index_is_the_longest_prefix_that_anything_shares(prompts, asked):
    memory = KVMemory(4096, 1)
    for tokens in prompts:
        cache(memory, tokens)

    def shared(a, b):
        return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))

    found = memory.explain(np.array(asked, np.int32), b"")
    longest = max((shared(tokens, asked) for tokens in prompts), default=0)
    assert found.index == longest
    if found.neighbour and found.index < len(asked):
        assert found.neighbour[0] != asked[found.index]
        after = asked[:longest] + list(found.neighbour)
        assert any(tokens[: len(after)] == after for tokens in prompts)


def test_a_page_goes_on_where_its_node_was(memory):
    for first in range(6):
        cache(memory, [first, 100])
    start = page(memory.tree, (), 3)
    assert start.next is not None
    gone = next(n for n in memory.tree.nodes() if n.serial == start.next[-1])
    memory.tree.drop(gone)
    rest = page(memory.tree, start.next, 10)
    assert [n.head[0] for n in start.nodes + rest.nodes] == [0, 1, 2, 3, 4, 5]
    assert rest.next is None
