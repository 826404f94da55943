"""Sequences of tokens as a tree, so that what they share is there once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..protocol.trie import MAX_NODES, Trie
from .request import IntArray


@dataclass(slots=True)
class Piece:
    """A part of a trie that is one by itself: some of its paths, whole."""

    message: Trie
    nodes: IntArray
    """[n] which nodes of the whole trie they are"""
    order: IntArray
    """[n] its nodes as the engine counts their log-probs: by parent"""
    first: npt.NDArray[np.bool_]
    """[n] whether nothing of the trie comes before a node"""


@dataclass(slots=True)
class TokenTrie:
    """N nodes, depth first."""

    tokens: IntArray
    parents: IntArray
    """[N] a node before, or -1"""
    paths: list[list[int]]
    """The nodes of each sequence, in the order in which they were given"""

    @property
    def longest(self) -> int:
        return max(map(len, self.paths), default=0)

    def pieces(self, inner: int) -> Iterator[Piece]:
        """Parts with at most ``inner`` nodes that have children, unless one path alone has more.
        What paths of two pieces share is in both."""
        nodes: set[int] = set()
        computed: set[int] = set()
        for path in sorted(map(tuple, self.paths)):
            more = computed.union(path[:-1])
            if nodes and (len(more) > inner or len(nodes) + len(path) > MAX_NODES):
                yield self._piece(nodes)
                nodes, more = set(), set(path[:-1])
            nodes.update(path)
            computed = more
        if nodes:
            yield self._piece(nodes)

    def _piece(self, nodes: set[int]) -> Piece:
        ids = np.array(sorted(nodes), np.int32)
        parents = np.searchsorted(ids, self.parents[ids]).astype(np.int32)
        parents[self.parents[ids] < 0] = -1
        message = Trie(tokens=self.tokens[ids].tobytes(), parents=parents.tobytes())
        order = np.argsort(parents, kind="stable").astype(np.int32)
        return Piece(message, ids, order, parents < 0)


def trie_of(rows: Sequence[Sequence[int]]) -> TokenTrie:
    """The tree of these sequences, of which some may be equal or begin others."""
    tokens: list[int] = []
    parents: list[int] = []
    paths: list[list[int]] = [[] for _ in rows]
    last: Sequence[int] = ()
    path: list[int] = []
    for number in sorted(range(len(rows)), key=lambda i: tuple(rows[i])):
        row = rows[number]
        same = 0
        while same < min(len(row), len(last)) and row[same] == last[same]:
            same += 1
        path = path[:same]
        for token in row[same:]:
            parents.append(path[-1] if path else -1)
            path.append(len(tokens))
            tokens.append(token)
        last = row
        paths[number] = path
    return TokenTrie(np.array(tokens, np.int32), np.array(parents, np.int32), paths)
