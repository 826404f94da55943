"""Streams that a gateway will go on with: their tokens, and a wish that their KV stay."""

from __future__ import annotations

import numpy as np

from ..memory.radix_tree import Node, RadixTree
from ..scheduler.batch import IntArray


class Handles:
    """Of one connection. A handle holds no KV: under pressure its KV is evicted (last, where the
    policy looks at programs) and computed again from the tokens kept here."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._kept: dict[int, tuple[IntArray, Node | None]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, handle: int, tokens: IntArray, node: Node | None) -> None:
        """Remember a sequence; a handle used again forgets what it was."""
        self.release(handle)
        if node is not None:
            self._tree.pin(node)
        self._kept[handle] = (tokens, node)

    def extend(self, handle: int, length: int, ids: IntArray) -> IntArray | None:
        """The handle's first ``length`` tokens and then ``ids``; ``None`` if it does not have
        them."""
        kept = self._kept.get(handle)
        if kept is None or not 0 <= length <= len(kept[0]):
            return None
        return np.concatenate((kept[0][:length], ids))

    def release(self, handle: int) -> None:
        """Forget a handle; an unknown one is ignored."""
        kept = self._kept.pop(handle, None)
        if kept is not None and kept[1] is not None:
            self._tree.unpin(kept[1])

    def clear(self) -> None:
        for handle in list(self._kept):
            self.release(handle)
