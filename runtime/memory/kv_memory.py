"""Pool and tree as one thing: the only way in which slots change hands.

Every usable slot is in exactly one of four sets, each with a record of its own:

    free        the pool's
    private     computed (or about to be) for one request and not shared yet; the request's record
    locked      in the tree, on a path that some request reads
    evictable   in the tree, read by nobody
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..protocol.messages import Divergence
from .block_chain import BLOCK
from .eviction import POLICIES
from .page_pool import PagePool, SlotArray
from .radix_node import Match, Node, TokenArray, common_prefix
from .radix_tree import RadixTree
from .spilling import Spilling
from .tiers import Copy, Tiers
from .tree_view import divergence

MOST_SPILLED = 64 * BLOCK
"""Tokens that are evicted beyond what is needed, where they are copied somewhere."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Slots by who has them, counted by each owner itself."""

    total: int
    free: int
    evictable: int
    locked: int
    private: int

    @property
    def held(self) -> int:
        return self.locked + self.private


@dataclass(slots=True, eq=False)
class Load:
    """KV that comes back from host memory: of ``tokens``, the first ``shared`` were in the tree."""

    tokens: TokenArray
    namespace: bytes
    node: Node
    slots: SlotArray
    shared: int
    copy: Copy
    blocks: int

    @property
    def private(self) -> SlotArray:
        return self.slots[self.shared :]


class KVMemory:
    """Slots for requests: cached prefixes are found, held and grown here; nothing else frees a
    slot."""

    def __init__(
        self,
        num_slots: int,
        page_size: int = 16,
        *,
        eviction: str = "lru",
        caching: bool = True,
        tiers: Tiers | None = None,
    ) -> None:
        """``caching`` false: nothing is kept when a request ends, nothing is shared. ``tiers``:
        where evicted KV goes, and comes back from."""
        self.pool = PagePool(num_slots, page_size)
        policy = POLICIES[eviction]()
        self.tree = RadixTree(self.pool, policy)
        self.caching = caching
        self.looks_ahead = caching and policy.looks_ahead
        """Whether eviction asks for what the queue will read."""
        self._private = 0
        self.tiers = tiers if caching else None
        self.spilling = Spilling(self.tree, self.tiers) if self.tiers else None

    @property
    def total(self) -> int:
        return self.pool.total

    @property
    def available(self) -> int:
        """Slots that can be had now: free, or evictable."""
        return self.pool.num_free + self.tree.num_evictable

    def usage(self) -> Usage:
        return Usage(
            self.pool.total,
            self.pool.num_free,
            self.tree.num_evictable,
            self.tree.num_locked,
            self._private,
        )

    def peek(self, tokens: TokenArray, namespace: bytes) -> int:
        """How many leading tokens are cached; changes nothing."""
        return self.tree.peek(tokens, namespace) if self.caching else 0

    def explain(self, tokens: TokenArray, namespace: bytes) -> Divergence:
        """Where ``tokens`` leaves what is cached; changes nothing."""
        if not self.caching:
            return Divergence(index=0, reason="off")
        return divergence(self.tree, tokens, namespace)

    def reach(
        self, tokens: TokenArray, namespace: bytes, near: Node | None
    ) -> tuple[Node | None, int]:
        """`RadixTree.reach`: how many leading tokens are cached, and where they are."""
        return self.tree.reach(tokens, namespace, near) if self.caching else (None, 0)

    def hold(self, tokens: TokenArray, namespace: bytes, near: Node | None = None) -> Match:
        """Find the longest cached prefix and lock it; give it up by `release`. ``near``: a node
        that was found on its path before."""
        match = self.tree.match(tokens if self.caching else tokens[:0], namespace, near)
        self.tree.lock(match.node)
        return match

    def allocate(self, count: int, position: int, after: int) -> SlotArray | None:
        """``count`` private slots, evicting as needed; ``None`` when held slots leave too few."""
        if not self._make_room(count):
            return None
        slots = self.pool.allocate(count, position, after)
        if slots is not None:
            self._private += count
        return slots

    def allocate_next(self, last: SlotArray, positions: TokenArray) -> SlotArray | None:
        """One private slot for each growing request, evicting as needed."""
        if not self._make_room(len(last)):
            return None
        slots = self.pool.allocate_next(last, positions)
        if slots is not None:
            self._private += len(last)
        return slots

    def share(
        self,
        node: Node,
        tokens: TokenArray,
        slots: SlotArray,
        shared: int,
        namespace: bytes,
        *,
        begins: bool = True,
    ) -> Match:
        """Put a computed prefix into the tree and hold it instead of ``node``.

        The first ``shared`` slots are the tree's already, the rest private; ``begins``: they lead
        to ``node``. The caller goes on with the returned slots, which hold the same tokens. Without
        caching nothing happens."""
        if not self.caching:
            return Match(node, slots)
        match = self.tree.insert(tokens, slots, namespace, (node, shared) if begins else None)
        self._private -= len(tokens) - shared
        self.tree.lock(match.node)
        self.tree.unlock(node)
        return match

    def give_back(self, private: SlotArray) -> None:
        """Free slots that never entered the tree."""
        self.pool.free(private)
        self._private -= len(private)

    def release(self, node: Node, private: SlotArray) -> None:
        """A request ends: give up the hold on ``node``, free slots that never entered the tree."""
        self.give_back(private)
        self.tree.unlock(node)

    def begin_load(
        self, tokens: TokenArray, namespace: bytes, names: Sequence[bytes]
    ) -> Load | None:
        """Bring KV of ``tokens`` back, as far as the tree does not have it: into private slots,
        until `end_load`. ``names`` are blocks in host memory, the last of which holds the last
        token. ``None``: held slots leave too few."""
        assert self.tiers is not None
        self.tiers.hold(names)  # taking slots evicts, and what is evicted wants their place
        match = self._hold_unused(tokens, namespace)
        blocks = -(-len(tokens) // BLOCK) - match.length // BLOCK
        after = int(match.slots[-1]) if match.length else -1
        slots = None
        if 0 < blocks <= len(names):
            slots = self.allocate(len(tokens) - match.length, match.length, after)
        if slots is None:
            self.tiers.release(names)
            self.release(match.node, _no_slots())
            return None
        self.tiers.release(names[: len(names) - blocks])
        names = names[len(names) - blocks :]
        copy = self.tiers.load(names, slots, match.length % BLOCK)
        every = np.concatenate((match.slots, slots))
        return Load(tokens, namespace, match.node, every, match.length, copy, blocks)

    def _hold_unused(self, tokens: TokenArray, namespace: bytes) -> Match:
        """`hold`, but that is no use of what is found: the use comes when it is all there."""
        node = at = self.tree.at(tokens, namespace)
        self.tree.lock(node)
        parts = [node.slots]
        while at.parent is not None:
            at = at.parent
            parts.append(at.slots)
        return Match(node, np.concatenate(parts[::-1]))

    def end_load(self, load: Load) -> None:
        """What was loaded is the tree's, and evictable. Call it when the copy is ready."""
        assert self.tiers is not None
        self.tiers.loaded(load.copy, load.blocks)
        match = self.share(load.node, load.tokens, load.slots, load.shared, load.namespace)
        self.release(match.node, _no_slots())

    def flush(self) -> int:
        """Forget all cached KV that nobody holds. Returns how many slots that freed. Raises
        `BackendError`, when that is done, where a disk keeps some."""
        freed = self.tree.clear()
        if self.tiers is not None:
            self.tiers.clear()
        return freed

    def assert_consistent(self, private: Iterable[SlotArray]) -> None:
        """Free, private, locked and evictable, each enumerated by itself, are together every slot
        once.

        ``private`` are the slots that the requests say are theirs.
        """
        self.pool.assert_consistent()
        self.tree.assert_consistent()
        mine = list(private)
        parts = [self.pool.free_slots(), *mine, *(node.slots for node in self.tree.nodes())]
        everything = np.sort(np.concatenate(parts))
        size = self.pool.page_size
        expected = np.arange(size, size + self.total, dtype=np.int32)
        assert len(everything) == self.total, f"{len(everything)} slots known of {self.total}"
        assert (everything == expected).all(), "some slot is in two sets, another in none"
        assert sum(map(len, mine)) == self._private, "private slots miscounted"

    def _make_room(self, count: int) -> bool:
        missing = count - self.pool.num_free
        if missing > self.tree.num_evictable:
            return False
        if missing > 0:
            # A little more than needed, so that a full cache is not trimmed at every step.
            more = self.total // 256
            if self.spilling is None:
                self.tree.evict(min(self.tree.num_evictable, missing + more))
            else:
                # Not much at a time: steps wait while it is named and its copies are launched.
                more = min(more, MOST_SPILLED)
                self.spilling.evict(min(self.tree.num_evictable, missing + more))
        return True


def _no_slots() -> SlotArray:
    return np.empty(0, np.int32)


__all__ = ["KVMemory", "Load", "Match", "Node", "Usage", "common_prefix"]
