"""Which leaf of the tree goes next, where what is known of leaves changes all the time."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from .eviction import EvictionPolicy

if TYPE_CHECKING:
    from .radix_tree import Node

_Entry = tuple[tuple[int, ...], int, "Node"]


class EvictionOrder:
    """A heap of leaves by their keys as these were when they were put in. A leaf whose key has
    risen is put back when it comes up. One whose key may have fallen must be offered again: by whom
    changes it, or, where time alone does that, at the time that the policy names."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._heap: list[_Entry] = []
        self._reviews: list[tuple[int, int, Node]] = []
        """(the clock at which to look again, serial, leaf)"""

    def offer(self, node: Node, now: int, nodes: int) -> None:
        """An unlocked leaf, one of so many ``nodes``, may go."""
        heapq.heappush(self._heap, (self._policy.key(node, now), node.serial, node))
        review = self._policy.review(node, now)
        if review is not None:
            heapq.heappush(self._reviews, (review, node.serial, node))
        if len(self._heap) + len(self._reviews) > 64 + 8 * nodes:
            self._compact(now)

    def refresh(self, now: int, nodes: int) -> None:
        """Before leaves are taken: those that time has changed are looked at again."""
        while self._reviews and self._reviews[0][0] <= now:
            _, _, node = heapq.heappop(self._reviews)
            if _may_go(node):
                self.offer(node, now, nodes)

    def take(self, now: int) -> Node | None:
        """The leaf that goes first; it is not in the order any more."""
        while self._heap:
            key, _, node = heapq.heappop(self._heap)
            if not _may_go(node):
                continue  # offered again when it becomes an unlocked leaf
            current = self._policy.key(node, now)
            if current == key:
                return node
            heapq.heappush(self._heap, (current, node.serial, node))
        return None

    def leaves(self) -> set[int]:
        """Ids of all that can be found here, for checks."""
        return {id(node) for _, _, node in self._heap}

    def _compact(self, now: int) -> None:
        leaves = {id(n): n for _, _, n in self._heap if _may_go(n)}.values()
        self._heap = [(self._policy.key(n, now), n.serial, n) for n in leaves]
        due = ((self._policy.review(n, now), n) for n in leaves)
        self._reviews = [(at, n.serial, n) for at, n in due if at is not None]
        heapq.heapify(self._heap)
        heapq.heapify(self._reviews)


def _may_go(node: Node) -> bool:
    return node.parent is not None and not node.lock and not node.children
