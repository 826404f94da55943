"""Streams that a gateway will go on with: their tokens, and a wish that their KV stay."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..memory.radix_node import Node
from ..memory.radix_tree import RadixTree
from ..scheduler.batch import IntArray


@dataclass(slots=True)
class _Kept:
    tokens: IntArray
    node: Node | None
    """Where its pin is; ``None``: its KV was never there."""
    namespace: bytes = b""
    ahead: int = 0
    """How many requests its program was to send yet."""


class Handles:
    """Of one connection. A handle holds no KV: under pressure its KV is evicted (last, where the
    policy looks at programs) and computed again from the tokens kept here."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._kept: dict[int, _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(
        self,
        handle: int,
        tokens: IntArray,
        node: Node | None,
        namespace: bytes = b"",
        ahead: int = 0,
    ) -> None:
        """Remember a sequence of a program that is to send ``ahead`` requests yet; a handle used
        again forgets what it was."""
        self._put(handle, _Kept(tokens, node, namespace, ahead))

    def mark(
        self,
        handle: int,
        tokens: IntArray,
        namespace: bytes,
        ahead: int = 0,
        near: Node | None = None,
    ) -> None:
        """Remember a prefix that will be read again, and wish that what there is of it stay.
        ``near``: a node that was found on its path, or on one that it begins."""
        node = self._tree.at(tokens, namespace, near)
        self._put(handle, _Kept(tokens, node, namespace, ahead))

    def renew(self, handle: int, ahead: int = 0) -> None:
        """More of a marked prefix has been computed, or again what was evicted: wish that it stay
        too. One that was released meanwhile is ignored."""
        kept = self._kept.get(handle)
        if kept is not None:
            self.mark(handle, kept.tokens, kept.namespace, ahead, kept.node)

    def extend(self, handle: int, length: int, ids: IntArray) -> IntArray | None:
        """The handle's first ``length`` tokens and then ``ids``; ``None`` if it does not have
        them."""
        kept = self._kept.get(handle)
        if kept is None or not 0 <= length <= len(kept.tokens):
            return None
        return np.concatenate((kept.tokens[:length], ids))

    def near(self, handle: int, length: int, namespace: bytes) -> Node | None:
        """A node on the path of the handle's first ``length`` tokens, if it is still there and of
        the namespace."""
        kept = self._kept.get(handle)
        node = None if kept is None or kept.namespace != namespace else kept.node
        if node is None or node.parent is None:
            return None
        depth = node.depth()
        while depth > length and node.parent is not None:
            depth -= len(node.slots)
            node = node.parent
        return node

    def release(self, handle: int) -> None:
        """Forget a handle; an unknown one is ignored."""
        kept = self._kept.pop(handle, None)
        if kept is not None and kept.node is not None:
            self._tree.unpin(kept.node)

    def clear(self) -> None:
        for handle in list(self._kept):
            self.release(handle)

    def _put(self, handle: int, kept: _Kept) -> None:
        if kept.node is not None:
            self._tree.pin(kept.node, ahead=kept.ahead)
        self.release(handle)
        self._kept[handle] = kept
