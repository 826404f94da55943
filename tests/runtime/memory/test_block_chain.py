"""Names of blocks: the same for the same tokens, however the tree is cut."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from ramet.runtime.memory.block_chain import BLOCK, BlockNames
from ramet.runtime.memory.page_pool import PagePool
from ramet.runtime.memory.radix_tree import RadixTree

NAMES = BlockNames(b"secret")


def plain(tokens, namespace=b""):
    array = np.array(tokens, np.int32)
    return list(NAMES.extend([], array, namespace, len(array) // BLOCK))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 70), st.integers(0, 70)), min_size=1, max_size=5
    ),
    st.sampled_from([b"", b"other"]),
)
def test_every_block_of_the_tree_has_the_name_of_its_tokens(shapes, namespace):
    """Each path shares some tokens with the one before and then goes its own way."""
    pool = PagePool(1024, 16)
    tree = RadixTree(pool)
    paths, last = [], []
    for kind, size, common in shapes:
        tokens = [*last[:common], *(kind * 1000 + i for i in range(size))]
        array = np.array(tokens, np.int32)
        match = tree.match(array, namespace)
        more = pool.allocate(len(tokens) - match.length)
        tree.insert(array, np.concatenate((match.slots, more)), namespace)
        if kind % 2:  # names are remembered here, and nodes are cut afterwards
            for node in tree.nodes():
                NAMES.leaving(node, 0)
        paths.append(tokens)
        last = tokens
    found = {}
    for node in tree.nodes():
        names, slots = NAMES.leaving(node, 0)
        assert slots.shape == (len(names), BLOCK)
        found.update(zip(names, map(tuple, slots.tolist())))
    wanted = {}
    for tokens in paths:
        slots = tree.match(np.array(tokens, np.int32), namespace).slots.tolist()
        for at, name in enumerate(plain(tokens, namespace)):
            wanted[name] = tuple(slots[at * BLOCK : (at + 1) * BLOCK])
    assert found == wanted


def test_only_blocks_that_end_in_what_goes():
    pool = PagePool(128, 16)
    tree = RadixTree(pool)
    tokens = np.arange(70, dtype=np.int32)
    node = tree.insert(tokens, pool.allocate(70)).node
    names = plain(tokens)
    for left, first in ((0, 0), (1, 0), (15, 0), (16, 1), (40, 2), (63, 3), (64, 4)):
        assert NAMES.leaving(node, left)[0] == names[first:]


def test_a_trimmed_leaf_that_grows_again_has_new_names():
    pool = PagePool(128, 16)
    tree = RadixTree(pool)
    one = np.arange(64, dtype=np.int32)
    two = np.concatenate((one[:40], 100 + one[40:]))
    tree.insert(one, pool.allocate(64))
    (leaf,) = tree.nodes()
    NAMES.leaving(leaf, 0)
    assert tree.evict(17) == 32  # whole pages
    match = tree.match(two)
    tree.insert(two, np.concatenate((match.slots, pool.allocate(64 - match.length))))
    found = [name for node in tree.nodes() for name in NAMES.leaving(node, 0)[0]]
    assert found == plain(two)


def test_names_say_namespace_secret_and_all_before():
    a = plain(range(48))
    assert len(set(a)) == 3
    assert not set(a) & set(plain(range(48), b"salt"))
    assert not set(a) & set(plain([*range(1, 49)]))
    assert plain([9, *range(1, 48)])[1:] != a[1:], "the same tokens after others"
    other = BlockNames(b"another").extend([], np.arange(48, dtype=np.int32), b"", 3)
    assert not set(a) & set(other)
