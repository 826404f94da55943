"""What a radix tree holds, for people to look at. Nothing here changes it: no hit is counted, no
edge is cut."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from ..protocol.messages import Divergence, TreeNode
from .radix_node import Node, TokenArray, common_prefix
from .radix_tree import RadixTree

AHEAD_TOKENS = 32
"""Of a neighbour, no more than this is shown."""
HEAD_TOKENS = 48
"""Of an edge, likewise."""
MOST_NEIGHBOURS = 64
"""How many ways on are compared with the prompt, those used last."""
MOST_CHILDREN = 1024
"""Among how many those are sought, the newest: nobody's question may keep the engine for long."""
MOST_NAMESPACES = 2048
"""How many namespaces are searched for a neighbour."""


def divergence(tree: RadixTree, tokens: TokenArray, namespace: bytes = b"") -> Divergence:
    """Where ``tokens`` leaves the cached paths of its namespace, and what goes on there instead."""
    root = tree.roots.get(namespace)
    if root is None or not root.children:
        return Divergence(index=0, reason="empty")
    node, done = root, 0
    while done < len(tokens):
        child = node.children.get(int(tokens[done]))
        if child is None:
            break
        same = common_prefix(child.tokens, tokens[done:])
        done += same
        if same < len(child.tokens):
            return Divergence(
                index=done,
                reason="whole" if done == len(tokens) else "differs",
                neighbour=tuple(_ahead(child, same).tolist()),
                branches=1,
                hits=child.hits,
            )
        node = child
    reason = "whole" if done == len(tokens) else "differs" if node.children else "ends"
    nearest = _nearest(node, tokens[done : done + AHEAD_TOKENS])
    if nearest is None:
        return Divergence(index=done, reason=reason)
    return Divergence(
        index=done,
        reason=reason,
        neighbour=tuple(_ahead(nearest, 0).tolist()),
        branches=len(node.children),
        hits=nearest.hits,
    )


def elsewhere(
    tree: RadixTree, tokens: TokenArray, namespace: bytes
) -> tuple[bytes, Divergence] | None:
    """The same for the other namespace that has the most of ``tokens``; ``None`` where none has
    any."""
    best, most = None, 0
    for name in list(tree.roots)[:MOST_NAMESPACES]:
        if name != namespace and (length := tree.peek(tokens, name)) > most:
            best, most = name, length
    return None if best is None else (best, divergence(tree, tokens, best))


def _ahead(node: Node, at: int) -> TokenArray:
    """Tokens from ``at`` of a node's edge on, along what was used last."""
    parts = [node.tokens[at : at + AHEAD_TOKENS]]
    size = len(parts[0])
    while size < AHEAD_TOKENS and node.children:
        node = max(_newest(node), key=_used)
        parts.append(node.tokens[: AHEAD_TOKENS - size])
        size += len(parts[-1])
    return np.concatenate(parts)


def _nearest(node: Node, rest: TokenArray) -> Node | None:
    """The child that goes on most like ``rest``, place by place; of several, the one used last."""
    used_last = heapq.nlargest(MOST_NEIGHBOURS, _newest(node), key=_used)
    best, most = None, -1
    for child in used_last:
        ahead = _ahead(child, 0)
        n = min(len(ahead), len(rest))
        alike = int((ahead[:n] == rest[:n]).sum())
        if alike > most:
            best, most = child, alike
    return best


def _newest(node: Node) -> Iterable[Node]:
    return islice(reversed(node.children.values()), MOST_CHILDREN)


def _used(node: Node) -> tuple[int, int]:
    return node.last_use, node.serial


@dataclass(frozen=True, slots=True)
class Page:
    """Some nodes, parents before children, and where to go on (``None``: that was the last)."""

    nodes: list[TreeNode]
    next: tuple[int, ...] | None


def page(tree: RadixTree, after: Sequence[int], limit: int) -> Page:
    """The next ``limit`` nodes after the one at the path ``after`` (serial numbers from a root
    down; empty: from the beginning).

    A node that has gone since is no error: the page goes on where it would have been. Looks at the
    children of the nodes shown and of those on the path, at no others."""
    walk = _Walk(tree, limit + 1)
    walk.resume(after)
    nodes: list[TreeNode] = []
    last: tuple[int, ...] = ()
    while len(nodes) < limit and (node := walk.next()) is not None:
        nodes.append(node)
        last = tuple(walk.path)
    more = walk.next() is not None
    return Page(nodes, last if more else None)


class _Walk:
    """Depth first; children in the order in which they were made. ``path`` leads to the node that
    `next` gave last."""

    def __init__(self, tree: RadixTree, most: int) -> None:
        self._most = most
        self._names = {root.serial: name for name, root in tree.roots.items()}
        self._levels = [self._later(tree.roots.values(), -1)]
        self._before = [0]
        self.path: list[int] = []

    def resume(self, after: Sequence[int]) -> None:
        """Go on behind a path, as far as there still is one."""
        if not after:
            return
        roots = self._levels[0]
        known = next((root for root in roots if root.serial == after[0]), None)
        self._levels = [[root for root in roots if root.serial > after[0]]]
        node = known
        for serial in after[1:]:
            if node is None:
                return
            children = node.children
            self._enter(node, self._later(children.values(), serial))
            node = next((child for child in children.values() if child.serial == serial), None)
        if node is not None:
            self._enter(node, self._later(node.children.values(), -1))

    def next(self) -> TreeNode | None:
        while self._levels:
            if not self._levels[-1]:
                self._levels.pop()
                self._before.pop()
                if self.path:
                    self.path.pop()
                continue
            node = self._levels[-1].pop()
            before = self._before[-1]
            self._enter(node, self._later(node.children.values(), -1))
            if node.parent is not None:
                return self._shown(node, before)
        return None

    def _enter(self, node: Node, level: list[Node]) -> None:
        self._levels.append(level)
        self._before.append(self._before[-1] + len(node.tokens))
        self.path.append(node.serial)

    def _later(self, nodes: Iterable[Node], serial: int) -> list[Node]:
        """Those made after ``serial``, the first of them last; no more than a page needs (of the
        roots all, as some may lead nowhere)."""
        later = [node for node in nodes if node.serial > serial]
        if later and later[0].parent is not None:
            later = heapq.nsmallest(self._most, later, key=_serial)
        return sorted(later, key=_serial, reverse=True)

    def _shown(self, node: Node, before: int) -> TreeNode:
        parent = node.parent
        assert parent is not None
        return TreeNode(
            id=node.serial,
            parent=None if parent.parent is None else parent.serial,
            namespace=self._names[self.path[0]],
            start=before,
            size=len(node.tokens),
            children=len(node.children),
            hits=node.hits,
            locks=node.lock,
            pins=node.pins,
            head=tuple(node.tokens[:HEAD_TOKENS].tolist()),
        )


def _serial(node: Node) -> int:
    return node.serial
