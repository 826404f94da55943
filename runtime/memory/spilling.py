"""What leaves the tree goes to the tiers; when there is time, what has not left yet as well."""

from __future__ import annotations

import time

import numpy as np

from .radix_node import Node
from .radix_tree import RadixTree
from .tiers import BlockSlots, Tiers

AT_ONCE = 256
"""Blocks that are looked at before the engine listens again."""

SAVED_AT_ONCE = 16
"""And how many of them are copied."""


class Spilling:
    """Of one tree."""

    def __init__(self, tree: RadixTree, tiers: Tiers) -> None:
        self._tree = tree
        self._tiers = tiers
        self._names: list[bytes] = []
        self._slots: list[BlockSlots] = []
        self._pending: list[Node] = []
        self._swept = tree.clock

    def evict(self, count: int) -> int:
        """`RadixTree.evict`, but what goes is kept in the tiers."""
        freed = self._tree.evict(count, self._note)
        self._save()
        return freed

    def _note(self, node: Node, left: int) -> None:
        names, slots = self._tiers.names.leaving(node, left)
        if names:
            self._names += names
            self._slots.append(slots)

    def _save(self) -> None:
        if self._names:
            self._tiers.save(self._names, np.concatenate(self._slots))
            self._names, self._slots = [], []

    # --- ahead of eviction ----------------------------------------------------------------------

    @property
    def behind(self) -> bool:
        """Whether the tree may hold what is not on disk, and the disk has time for it."""
        disk = self._tiers.disk
        if disk is None or disk.room <= 0:
            return False
        return bool(self._pending) or self._swept != self._tree.clock

    def rest(self) -> None:
        """Nothing else is to be done: write some more of what the tree and host memory hold, so
        that it survives this process. What was used last goes first."""
        disk = self._tiers.disk
        if disk is None:
            return
        if not self._pending and self._swept != self._tree.clock:
            self._swept = self._tree.clock
            # A path's beginning is used whenever its end is, and was made before it.
            self._pending = sorted(
                self._tree.nodes(), key=lambda node: (node.last_use, -node.serial)
            )
        looked = 0
        while self._pending and looked < AT_ONCE and disk.room > 0:
            node = self._pending[-1]
            names: list[bytes] = []
            if node.parent is not None:  # it is still there
                names, slots = self._tiers.names.leaving(node, 0)
                looked += len(names)
                if not self._keep(names, slots):
                    return
            self._pending.pop()
            looked += 1

    def _keep(self, names: list[bytes], slots: BlockSlots) -> bool:
        """See that these blocks are written. False: some must wait for another time."""
        disk, host = self._tiers.disk, self._tiers.host
        assert disk is not None
        absent = [at for at, name in enumerate(names) if not disk.has(name)]
        some = absent[: min(disk.room, SAVED_AT_ONCE)]
        for at in some:
            if names[at] in host:
                self._tiers.store(names[at])
        fresh = [at for at in some if names[at] not in host]
        if fresh:
            self._tiers.save([names[at] for at in fresh], slots[fresh])
        return len(some) == len(absent)

    def finish(self, seconds: float) -> None:
        """Write as much as that time allows, before the end."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.rest()
            self._tiers.poll()
            if not self.behind and not self._tiers.busy:
                return
            time.sleep(0.001)
