"""Sequences as a tree, whole and in pieces that the engine takes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from ramet.runtime.gateway.token_trie import trie_of
from ramet.runtime.scheduler.trie import trie_of as taken_in

rows = st.lists(st.lists(st.integers(0, 3), max_size=7), max_size=12)


def spelled(trie, node):
    path = []
    while node >= 0:
        path.append(int(trie.tokens[node]))
        node = int(trie.parents[node])
    return tuple(path[::-1])


@given(rows)
def test_every_sequence_is_a_path_and_what_they_share_is_there_once(rows):
    trie = trie_of(rows)
    for row, path in zip(rows, trie.paths, strict=True):
        assert trie.tokens[path].tolist() == row
        assert trie.parents[path].tolist() == [-1, *path][: len(path)]
    nodes = [spelled(trie, node) for node in range(len(trie.tokens))]
    assert sorted(nodes) == sorted({tuple(r[: i + 1]) for r in rows for i in range(len(r))})
    assert trie.longest == max(map(len, rows), default=0)


@given(rows, st.integers(0, 9))
def test_pieces_are_trees_of_whole_paths(rows, inner):
    trie = trie_of(rows)
    covered = set()
    for piece in trie.pieces(inner):
        found = taken_in(piece.message, 4)
        inside = set(piece.nodes.tolist())
        covered |= inside
        paths = {tuple(path) for path in trie.paths if path and inside.issuperset(path)}
        assert inside == {node for path in paths for node in path}, "part of a path"
        longest = max(len(path) for path in paths)
        assert len(found.nodes) <= max(inner, longest - 1)
        # Log-probs come in the order of the engine's targets.
        assert found.targets.tolist() == trie.tokens[piece.nodes[piece.order]].tolist()
        tokens = np.frombuffer(piece.message.tokens, np.int32)
        assert tokens.tolist() == trie.tokens[piece.nodes].tolist()
    assert covered == set(range(len(trie.tokens)))


def test_five_hundred_in_one_piece():
    choices = [[7, i // 25, i % 25] for i in range(500)]
    (piece,) = trie_of(choices).pieces(2048)
    assert len(piece.nodes) == 521
    assert len(taken_in(piece.message, 100).nodes) == 21
