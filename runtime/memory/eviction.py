"""In which order cached KV goes when room is needed."""

from __future__ import annotations

from typing import Protocol


class Evictable(Protocol):
    """What a policy may look at: one unlocked leaf of the tree."""

    last_use: int
    """The tree's clock when it was last matched or inserted."""
    hits: int
    """How often a request matched through it."""
    pins: int
    """How many live streams will probably read it again."""


class EvictionPolicy(Protocol):
    """Smaller keys go first. Keys of one policy compare with each other."""

    def key(self, node: Evictable) -> tuple[int, ...]: ...


class LeastRecentlyUsed:
    """Evict what was not used for the longest time."""

    def key(self, node: Evictable) -> tuple[int, ...]:
        return (node.last_use,)


class LeastFrequentlyUsed:
    """Evict what was matched least often, the older first."""

    def key(self, node: Evictable) -> tuple[int, ...]:
        return (node.hits, node.last_use)


class ProgramAware:
    """Evict first what no live stream will read again, then by last use."""

    def key(self, node: Evictable) -> tuple[int, ...]:
        return (int(node.pins > 0), node.last_use)


POLICIES: dict[str, type[EvictionPolicy]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "program": ProgramAware,
}
