"""In which order cached KV goes when room is needed."""

from __future__ import annotations

from typing import Protocol

from .return_times import ReturnTimes, start_of, stretch_of

_MANY = 4
"""More streams than so many are not told apart."""
_GUESSED, _ANNOUNCED, _QUEUED = 0, 1, 2
_OFTEN = 3
"""More reads than so many are not told apart."""


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
    ahead: int
    """How many requests its program was to send yet, when one of them last wished for it."""
    returns: int
    """How often a request came for it when nobody wished for it any more."""
    since: int
    """The tree's clock when it was last used, or began (or ceased) to be wished for."""


class EvictionPolicy:
    """Smaller keys go first. Keys of one policy compare with each other. ``now`` is the tree's
    clock."""

    looks_ahead = False
    """Whether it asks for what the queue will read."""

    def key(self, node: Evictable, now: int) -> tuple[int, ...]:
        raise NotImplementedError

    def review(self, node: Evictable, now: int) -> int | None:
        """When a key falls with time alone: the clock at which to look at it again."""

    # What happens to nodes, told before they change.

    def read(self, node: Evictable, now: int) -> None:
        """A request has come for it."""

    def left(self, node: Evictable, now: int) -> None:
        """It goes, or begins (or ceases) to be wished for."""


class LeastRecentlyUsed(EvictionPolicy):
    """Evict what was not used for the longest time."""

    def key(self, node: Evictable, now: int) -> tuple[int, ...]:
        del now
        return (node.last_use,)


class LeastFrequentlyUsed(EvictionPolicy):
    """Evict what was matched least often, the older first."""

    def key(self, node: Evictable, now: int) -> tuple[int, ...]:
        del now
        return (node.hits, node.last_use)


class ProgramAware(EvictionPolicy):
    """Evict first what nobody has announced to read, by how soon such nodes were read before; then
    what a live program has yet to read: for few of its streams before for many, of programs with
    little to come before others, and what was used last before what its reader must come for soon.
    Last goes what a request in the queue will read, from the queue's end on: what its head reads
    is needed next, however long ago it was used.

    What is not announced is of eight kinds: ends of streams that are kept for a program which has
    not said whether it goes on, by how often they were read, and what nobody keeps, by how often
    somebody came for it all the same."""

    looks_ahead = True

    def __init__(self) -> None:
        self._times = ReturnTimes(2 * (_OFTEN + 1), _expected)

    def key(self, node: Evictable, now: int) -> tuple[int, ...]:
        if node.awaited:
            return (_QUEUED, -node.due)
        if node.pins and node.ahead:
            return (_ANNOUNCED, min(node.pins, _MANY), node.ahead, -node.last_use)
        level = self._times.level(_kind_of(node), now - node.last_use)
        return (_GUESSED, level, node.last_use)

    def review(self, node: Evictable, now: int) -> int | None:
        if node.awaited or (node.pins and node.ahead):
            return None
        age, following = now - node.last_use, stretch_of(now - node.last_use) + 1
        return node.last_use + max(start_of(following), age + 1)

    def read(self, node: Evictable, now: int) -> None:
        self._spell(node, now, read=True)

    def left(self, node: Evictable, now: int) -> None:
        self._spell(node, now, read=False)

    def _spell(self, node: Evictable, now: int, *, read: bool) -> None:
        begun, ended = node.since - node.last_use, now - node.last_use
        self._times.spell(_kind_of(node), begun, ended, read=read)


def _kind_of(node: Evictable) -> int:
    if node.pins:
        return _OFTEN + 1 + min(node.hits, _OFTEN)
    return min(node.returns, _OFTEN)


def _expected(kind: int, age: int) -> float:
    """Reads a tick, before anything is known: what was used long ago is read late."""
    if kind > _OFTEN:
        return 1 / (64 + age)
    return 0.02 * (1 + 3 * kind) / (64 + age)


POLICIES: dict[str, type[EvictionPolicy]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "program": ProgramAware,
}
