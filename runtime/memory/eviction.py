"""In which order cached KV goes when room is needed."""

from __future__ import annotations

from typing import Protocol

_MANY = 4
"""More streams than so many are not told apart."""


class Evictable(Protocol):
    """What a policy may look at: one unlocked leaf of the tree."""

    last_use: int
    """The tree's clock when it was last matched or inserted."""
    hits: int
    """How often a request matched through it."""
    pins: int
    """How many live streams will probably read it again."""
    awaited: int
    """How many of them have a request in the queue that does."""
    due: int
    """The place of the first of these in the order of their coming."""


class EvictionPolicy(Protocol):
    """Smaller keys go first. Keys of one policy compare with each other. ``looks_ahead``: whether
    it asks for what the queue will read."""

    looks_ahead: bool

    def key(self, node: Evictable) -> tuple[int, ...]: ...


class LeastRecentlyUsed:
    """Evict what was not used for the longest time."""

    looks_ahead = False

    def key(self, node: Evictable) -> tuple[int, ...]:
        return (node.last_use,)


class LeastFrequentlyUsed:
    """Evict what was matched least often, the older first."""

    looks_ahead = False

    def key(self, node: Evictable) -> tuple[int, ...]:
        return (node.hits, node.last_use)


class ProgramAware:
    """Evict first what no live stream will read again, by last use; then what few will, before what
    many will; and last what a request in the queue will, from the queue's end on: what its head
    reads is needed next, however long ago it was used."""

    looks_ahead = True

    def key(self, node: Evictable) -> tuple[int, ...]:
        if node.awaited:
            return (_MANY + 1, -node.due)
        return (min(node.pins, _MANY), node.last_use)


POLICIES: dict[str, type[EvictionPolicy]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "program": ProgramAware,
}
