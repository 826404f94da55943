"""Sets of characters as the byte sequences of their UTF-8."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

from .charset import Ranges

ByteRange = tuple[int, int]

_LENGTH_ENDS = (0x7F, 0x7FF, 0xFFFF, 0x10FFFF)
END = -1
"""The child that ends a character."""


class Trie:
    """A set of characters as a deterministic automaton over bytes.

    ``nodes[i]`` is a tuple of (first byte, last byte, child), by byte; child `END` ends the
    character. Node 0 is the root; equal subtrees are one node.
    """

    def __init__(self, ranges: Ranges) -> None:
        self.nodes: list[tuple[tuple[int, int, int], ...]] = [()]
        self._known: dict[tuple[tuple[int, int, int], ...], int] = {}
        sequences = [s for first, last in ranges for s in sequences_of(first, last)]
        self.nodes[0] = self._edges(sequences)

    def _edges(self, sequences: list[tuple[ByteRange, ...]]) -> tuple[tuple[int, int, int], ...]:
        """Edges for sequences of which none is a prefix of another; sorted as they come."""
        cuts = sorted({s[0][0] for s in sequences} | {s[0][1] + 1 for s in sequences})
        edges: list[tuple[int, int, int]] = []
        for low, after in pairwise(cuts):
            rest = [s[1:] for s in sequences if s[0][0] <= low and after - 1 <= s[0][1]]
            if not rest:
                continue
            child = END if not rest[0] else self._node(rest)
            if edges and edges[-1][2] == child and edges[-1][1] == low - 1:
                edges[-1] = (edges[-1][0], after - 1, child)
            else:
                edges.append((low, after - 1, child))
        return tuple(edges)

    def _node(self, sequences: list[tuple[ByteRange, ...]]) -> int:
        edges = self._edges(sequences)
        if edges not in self._known:
            self._known[edges] = len(self.nodes)
            self.nodes.append(edges)
        return self._known[edges]


@lru_cache(maxsize=256)
def trie_of(ranges: Ranges) -> Trie:
    """The (shared, immutable) trie of a set of characters."""
    return Trie(ranges)


def sequences_of(first: int, last: int) -> Iterator[tuple[ByteRange, ...]]:
    """Byte ranges, position by position, that together spell exactly [first, last] in UTF-8.

    Neither end is a surrogate, nor does the range span them.
    """
    for end in _LENGTH_ENDS:
        if first <= end < last:
            yield from sequences_of(first, end)
            yield from sequences_of(end + 1, last)
            return
    for bits in (6, 12, 18):  # cut where a range does not cover whole blocks of its tail
        low = (1 << bits) - 1
        if first >> bits != last >> bits and last > 0x7F:
            if first & low:
                yield from sequences_of(first, first | low)
                yield from sequences_of((first | low) + 1, last)
                return
            if last & low != low:
                yield from sequences_of(first, (last & ~low) - 1)
                yield from sequences_of(last & ~low, last)
                return
    yield tuple(zip(chr(first).encode(), chr(last).encode()))
