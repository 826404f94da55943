"""A radix tree over token ids whose edges hold the KV slots of their tokens.

Every common prefix is kept once, token for token (SGLang's RadixAttention, arXiv 2312.07104, shares
the idea). A path from the root of a namespace spells a prompt; namespaces share nothing.

                 root
                  │ [1 9690 198 …]            slots [16 17 18 …]     lock 2
          ┌───────┴────────┐
     [504 3575]         [2683 …]              each child's first token differs
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from .eviction import EvictionPolicy, LeastRecentlyUsed
from .eviction_order import EvictionOrder
from .page_pool import PagePool, SlotArray
from .radix_node import Match, Node, TokenArray, common_prefix

_NO_SLOTS: SlotArray = np.empty(0, np.int32)
_MANY_ROOTS = 1024


class RadixTree:
    """Owns the slots of its edges in the pool. A caller holds what it reads by `lock` and gives it
    up by `unlock`; what nobody locks is evictable. Pins are wishes: they only make a node go
    later."""

    def __init__(self, pool: PagePool, policy: EvictionPolicy | None = None) -> None:
        self._pool = pool
        self._policy = policy or LeastRecentlyUsed()
        self._roots: dict[bytes, Node] = {}
        self._order = EvictionOrder(self._policy)
        self._sweep_at = _MANY_ROOTS
        self._clock = 0
        self._serial = 0
        self._wishes = 0
        self._num_nodes = 0
        self._evictable = 0
        self._locked = 0

    @property
    def num_evictable(self) -> int:
        """Slots of nodes that nobody locks."""
        return self._evictable

    @property
    def num_locked(self) -> int:
        """Slots of nodes that somebody locks."""
        return self._locked

    @property
    def clock(self) -> int:
        """Moves with every match and insertion."""
        return self._clock

    @property
    def roots(self) -> Mapping[bytes, Node]:
        """Where each namespace begins."""
        return self._roots

    def root(self, namespace: bytes = b"") -> Node:
        node = self._roots.get(namespace)
        if node is None:
            if len(self._roots) >= self._sweep_at:
                self._forget_empty_roots()
                self._sweep_at = _MANY_ROOTS + 2 * len(self._roots)
            node = self._roots[namespace] = self._node(None, _NO_SLOTS, _NO_SLOTS)
            node.chain = 0, namespace
        return node

    def match(self, tokens: TokenArray, namespace: bytes = b"", near: Node | None = None) -> Match:
        """The longest cached prefix of ``tokens``. Splits an edge that it ends inside. ``near``: a
        node that was found on their path before; the search begins there, if it still can."""
        self._clock += 1
        begin, done = self._begin(namespace, near, len(tokens))
        parts = begin.path_slots()
        for node in begin.path():
            self._used(node, hit=1)
        node, more, _ = self._walk(begin, tokens, done, hit=1)
        parts += more
        slots = np.concatenate(parts) if len(parts) > 1 else parts[0] if parts else _NO_SLOTS
        return Match(node, slots)

    def peek(self, tokens: TokenArray, namespace: bytes = b"") -> int:
        """How many leading tokens are cached; changes nothing."""
        return self.reach(tokens, namespace)[1]

    def reach(
        self, tokens: TokenArray, namespace: bytes = b"", near: Node | None = None
    ) -> tuple[Node | None, int]:
        """How many leading tokens are cached, and the last node that holds nothing else; changes
        nothing. ``near``: as in `match`."""
        if namespace not in self._roots:
            return None, 0
        size = len(tokens)
        node, done = self._begin(namespace, near, size)
        if done == size:
            return node, done
        data, first = _spelled(tokens)
        while done < size:
            child = node.children.get(first[done])
            if child is None:
                break
            if not data.startswith(child.data, 4 * done):
                done += common_prefix(child.tokens, tokens[done:])
                break
            done += len(child.slots)
            node = child
        return node, done

    def at(self, tokens: TokenArray, namespace: bytes = b"", near: Node | None = None) -> Node:
        """The node that the longest cached prefix of ``tokens`` ends at; an edge that it ends
        inside is split. That is no use of it. ``near``: as in `match`."""
        node, done = self._begin(namespace, near, len(tokens))
        return self._walk(node, tokens, done, hit=None)[0]

    def insert(
        self,
        tokens: TokenArray,
        slots: SlotArray,
        namespace: bytes = b"",
        held: tuple[Node, int] | None = None,
    ) -> Match:
        """Put a computed prefix in, with the slots of its KV; returns its canonical slots and last
        node.

        Where the tree already has a token, its own slot is canonical and the caller's (if another)
        is freed here, so the caller must replace its slots by the returned ones. The rest becomes
        the tree's. ``held``: a node on the path that the caller locks, and how many tokens lead to
        it; their slots are the tree's."""
        assert len(tokens) == len(slots)
        self._clock += 1
        start, begin = held or (self.root(namespace), 0)
        for node in start.path():
            self._used(node, hit=0)
        node, parts, done = self._walk(start, tokens, begin, hit=0)
        if done > begin:
            canonical = np.concatenate((slots[:begin], *parts, slots[done:]))
            mine = slots[begin:done]
            self._pool.free(mine[mine != canonical[begin:done]])
        else:
            canonical = slots.copy()
        if done == len(tokens):
            return Match(node, canonical)
        rest = canonical[done:].copy()
        self._pool.to_tree(rest)
        leaf = self._node(node, tokens[done:], rest)
        node.children[int(tokens[done])] = leaf
        self._evictable += len(rest)
        self._offer(leaf)
        return Match(leaf, canonical)

    def lock(self, node: Node) -> None:
        """Hold the path from the root to ``node``."""
        at: Node | None = node
        while at is not None:
            if at.lock == 0:
                self._evictable -= len(at.slots)
                self._locked += len(at.slots)
            at.lock += 1
            at = at.parent

    def unlock(self, node: Node) -> None:
        """Give up one `lock` of the same node."""
        at: Node | None = node
        while at is not None:
            assert at.lock > 0, "unlocked more often than locked"
            at.lock -= 1
            if at.lock == 0:
                self._locked -= len(at.slots)
                self._evictable += len(at.slots)
                self._offer(at)
            at = at.parent

    def pin(self, node: Node, *, awaited: bool = False, ahead: int = 0) -> None:
        """Wish that the path to ``node`` stay; ``awaited``: for somebody who is in the queue, else
        for a program that is to send ``ahead`` requests yet, as far as is known."""
        at: Node | None = node
        self._wishes += awaited
        while at is not None:
            if awaited and not at.awaited:
                at.due = self._wishes
                self._came_for(at)
            elif not at.pins:
                self._policy.left(at, self._clock)
                at.since = self._clock
            if not awaited:
                at.ahead = ahead
            at.pins += 1
            at.awaited += awaited
            at = at.parent

    def unpin(self, node: Node, *, awaited: bool = False) -> None:
        """Take one wish back, made in the same words. Of a node that was evicted meanwhile the wish
        has gone with it."""
        if not node.pins:
            return
        at: Node | None = node
        while at is not None:
            assert at.pins > 0, "unpinned more often than pinned"
            if at.pins == 1:
                self._policy.left(at, self._clock)
                at.since = self._clock
            at.pins -= 1
            at.awaited -= awaited
            at = at.parent
        self._offer(node)  # it may go sooner now than its place in the heap says

    def evict(self, count: int, leaving: Callable[[Node, int], None] | None = None) -> int:
        """Free at least ``count`` evictable slots, leaf by leaf in the policy's order, or all there
        are. Of the last leaf no more goes than must. Returns how many were freed. ``leaving`` is
        told of each leaf, before it goes, how many of its tokens stay."""
        freed = 0
        gone: list[SlotArray] = []
        self._order.refresh(self._clock, self._num_nodes)
        while freed < count and (node := self._order.take(self._clock)) is not None:
            pages = -(-(count - freed) // self._pool.page_size)
            left = max(0, len(node.slots) - pages * self._pool.page_size)
            if leaving is not None:
                leaving(node, left)
            if left > 0:
                gone.append(self._trim(node, left))
            else:
                gone.append(self._remove(node))
            freed += len(gone[-1])
        if gone:
            self._pool.free(np.concatenate(gone))
        return freed

    def drop(self, node: Node) -> None:
        """Forget the tail of a path, from ``node`` up to what others hold or continue from."""
        while node.parent is not None and not node.lock and not node.children:
            parent = node.parent
            self._pool.free(self._remove(node))
            node = parent

    def clear(self) -> int:
        """Free all that nobody locks. Returns how many slots were freed."""
        freed = self.evict(self._evictable)
        self._forget_empty_roots()
        return freed

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents before children."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())

    def assert_consistent(self) -> None:
        """Structure, locks and counters are as promised."""
        evictable = locked = 0
        for node in self.nodes():
            parent = node.parent
            assert parent is not None
            assert len(node.tokens) == len(node.slots) > 0, "an edge without tokens"
            assert parent.children[int(node.tokens[0])] is node, "filed under a wrong token"
            assert parent.lock >= node.lock, "a locked node below an unlocked one"
            assert parent.pins >= node.pins >= node.awaited >= 0
            assert parent.awaited >= node.awaited
            if node.lock:
                locked += len(node.slots)
            else:
                evictable += len(node.slots)
        assert evictable == self._evictable, "evictable slots miscounted"
        assert locked == self._locked, "locked slots miscounted"
        offered = self._order.leaves()
        for node in self.nodes():
            if node.lock == 0 and not node.children:
                assert id(node) in offered, "an unlocked leaf that eviction cannot find"

    def _forget_empty_roots(self) -> None:
        """Namespaces come and go, one a salt; those that hold nothing are not kept."""
        for namespace in [name for name, root in self._roots.items() if not root.children]:
            if self._roots[namespace].lock == 0 and self._roots[namespace].pins == 0:
                self._num_nodes -= 1
                del self._roots[namespace]

    def _node(self, parent: Node | None, tokens: TokenArray, slots: SlotArray) -> Node:
        self._serial += 1
        self._num_nodes += 1
        node = Node(parent, tokens, slots, self._serial)
        node.last_use = node.since = self._clock
        return node

    def _begin(self, namespace: bytes, near: Node | None, size: int) -> tuple[Node, int]:
        """Where to begin to look for ``size`` tokens, and how many of them lead there."""
        if near is None or near.parent is None:  # a root, or evicted
            return self.root(namespace), 0
        done = near.depth()
        while done > size:
            done -= len(near.slots)
            assert near.parent is not None
            near = near.parent
        return near, done

    def _walk(
        self, node: Node, tokens: TokenArray, done: int, *, hit: int | None
    ) -> tuple[Node, list[SlotArray], int]:
        """On from ``node``, to which the first ``done`` tokens lead."""
        parts: list[SlotArray] = []
        size = len(tokens)
        if done == size:
            return node, parts, done
        data, first = _spelled(tokens)
        while done < size:
            child = node.children.get(first[done])
            if child is None:
                break
            if not data.startswith(child.data, 4 * done):
                child = self._split(child, common_prefix(child.tokens, tokens[done:]))
            if hit is not None:
                self._used(child, hit)
            parts.append(child.slots)
            done += len(child.slots)
            node = child
        return node, parts, done

    def _used(self, node: Node, hit: int) -> None:
        """A request has it inserted, or with ``hit`` found."""
        if hit and not node.awaited:  # else that was told when the request came
            self._came_for(node)
        node.last_use = node.since = self._clock
        node.hits += hit

    def _split(self, node: Node, at: int) -> Node:
        """Cut an edge in two; returns the new upper node. Locks and pins of the lower cover
        both."""
        parent = node.parent
        assert parent is not None
        assert 0 < at < len(node.tokens)
        upper = self._node(parent, node.tokens[:at], node.slots[:at])
        upper.lock, upper.pins, upper.awaited = node.lock, node.pins, node.awaited
        upper.hits, upper.last_use, upper.due = node.hits, node.last_use, node.due
        upper.ahead, upper.returns, upper.since = node.ahead, node.returns, node.since
        parent.children[int(node.tokens[0])] = upper
        node.spell(node.tokens[at:], node.slots[at:])
        node.parent = upper
        upper.children[int(node.tokens[0])] = node
        return upper

    def _offer(self, node: Node) -> None:
        """Let eviction know of an unlocked leaf."""
        if node.parent is not None and not node.children and node.lock == 0:
            self._order.offer(node, self._clock, self._num_nodes)

    def _came_for(self, node: Node) -> None:
        self._policy.read(node, self._clock)
        node.returns += not node.pins
        node.since = self._clock

    def _trim(self, node: Node, left: int) -> SlotArray:
        """Evict the end of a leaf, whose slots are then the caller's to free. It stays the same
        node, and what is wished of it stands."""
        gone = node.slots[left:]
        node.spell(node.tokens[:left], node.slots[:left].copy())
        node.chain = None
        self._evictable -= len(gone)
        self._offer(node)
        return gone

    def _remove(self, node: Node) -> SlotArray:
        """Forget a leaf, whose slots are then the caller's to free."""
        parent = node.parent
        assert parent is not None
        self._policy.left(node, self._clock)
        del parent.children[int(node.tokens[0])]
        node.parent = None
        self._num_nodes -= 1
        self._evictable -= len(node.slots)
        at: Node | None = parent
        while at is not None and node.pins:
            at.pins -= node.pins
            at.awaited -= node.awaited
            at = at.parent
        node.pins = node.awaited = 0
        self._offer(parent)
        return node.slots


def _spelled(tokens: TokenArray) -> tuple[bytes, memoryview]:
    """Tokens as bytes, which are compared at once, and one by one."""
    data = np.asarray(tokens, np.int32).tobytes()
    return data, memoryview(data).cast("i")
