"""Which leaf of the tree goes next, where what is known of leaves changes all the time."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from .eviction import EvictionPolicy

if TYPE_CHECKING:
    from .radix_node import Node

_AT_ONCE = 32
"""Leaves that are looked at again at a time: a step waits for it."""


class EvictionOrder:
    """A heap of leaves by their keys as these were when they were put in, each once (``queued`` is
    where). A leaf whose key has risen is put back when it comes up. One whose key may have fallen
    must be offered again: by whom changes it, or, where time alone does that, at the time that the
    policy names (``review``)."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[tuple[int, ...], int, Node]] = []
        self._reviews: list[tuple[int, int, Node]] = []
        """(the clock at which to look again, serial, leaf)"""

    def offer(self, node: Node, now: int, nodes: int) -> None:
        """An unlocked leaf, one of so many ``nodes``, may go."""
        key = self._policy.key(node, now)
        if node.queued is None or key < node.queued:
            node.queued = key
            heapq.heappush(self._heap, (key, node.serial, node))
        review = self._policy.review(node, now)
        if review is not None and (node.review is None or review < node.review):
            node.review = review
            heapq.heappush(self._reviews, (review, node.serial, node))
        if len(self._heap) + len(self._reviews) > 64 + 4 * nodes:
            self._compact()

    def refresh(self, now: int, nodes: int) -> None:
        """Before leaves are taken: those that time has changed are looked at again, or the first
        of them, where there are many. Others go a little later than they should."""
        for _ in range(_AT_ONCE):
            if not self._reviews or self._reviews[0][0] > now:
                return
            at, _, node = heapq.heappop(self._reviews)
            if at == node.review:
                node.review = None
                if _may_go(node):
                    self.offer(node, now, nodes)

    def take(self, now: int) -> Node | None:
        """The leaf that goes first; it is not in the order any more."""
        while self._heap:
            key, _, node = heapq.heappop(self._heap)
            if key != node.queued:
                continue  # it has been put further to the front since
            node.queued = None
            if not _may_go(node):
                continue  # offered again when it becomes an unlocked leaf
            current = self._policy.key(node, now)
            if current <= key:
                return node
            node.queued = current
            heapq.heappush(self._heap, (current, node.serial, node))
        return None

    def leaves(self) -> set[int]:
        """Ids of all that can be found here, for checks."""
        return {id(node) for key, _, node in self._heap if key == node.queued}

    def _compact(self) -> None:
        heap, reviews = self._heap, self._reviews
        self._heap = [e for e in heap if e[0] == e[2].queued and _may_go(e[2])]
        self._reviews = [e for e in reviews if e[0] == e[2].review and _may_go(e[2])]
        for key, _, node in heap:
            if key == node.queued and not _may_go(node):
                node.queued = None
        for at, _, node in reviews:
            if at == node.review and not _may_go(node):
                node.review = None
        heapq.heapify(self._heap)
        heapq.heapify(self._reviews)


def _may_go(node: Node) -> bool:
    return node.parent is not None and not node.lock and not node.children
