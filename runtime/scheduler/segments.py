"""Which keys the decoding requests of a step share: found when who decodes changes, else kept.

A slot of the radix tree belongs to one node, so whoever has it at some position has the same slots
at all positions before: rows of slots are compared at single places, by halving. Rows are kept in
an order in which those that share are neighbours (that of the tree's leaves), with the number of
slots that each has in common with the next::

    order    3    7    1      4          the three first share 8192 positions,
    common    8192 9216  0               rows 7 and 1 another 1024
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .batch import IntArray, LongArray
from .rows import Rows
from .tree_plan import TreePlan

REFRESH = 256
"""Steps after which a plan is made anew although nobody came or went: tails have grown."""
_FEW = 6
"""Rows that come at once and are placed one by one; for more, all are ordered anew."""
_CHECKED = 128
"""Places of a row at which an order from scratch looks."""


@dataclass(frozen=True, slots=True)
class SharingCost:
    """What sharing costs, in keys of one item: reading so many takes as long."""

    reader: int = 64
    """For each reader of a segment: its partial result, written and merged."""
    segment: int = 64
    step: int = 4096
    """For sharing at all: one kernel more in each layer."""


class SegmentFinder:
    """Plans which keys are read once for several rows of `Rows`."""

    def __init__(self, rows: Rows, cost: SharingCost | None = None) -> None:
        self._rows = rows
        self._cost = cost or SharingCost()
        self._members: IntArray = np.empty(0, np.int32)
        self._epochs: LongArray = np.empty(0, np.int64)
        self._order: IntArray = np.empty(0, np.int32)
        self._order_epochs: LongArray = np.empty(0, np.int64)
        self._common: IntArray = np.empty(0, np.int32)
        self._plan: TreePlan | None = None
        self._version = 0
        self._age = 0

    def find(self, members: IntArray, kv_lens: IntArray) -> TreePlan | None:
        """The plan for decoding rows ``members`` [B], item by item, with ``kv_lens`` [B] tokens
        each, the newest (which no other row has) among them. ``None`` where sharing does not pay.

        The same object comes back, with the same version, for as long as nothing changed.
        """
        epochs = self._rows.epoch[members]
        same = len(members) == len(self._members)
        if same and np.array_equal(members, self._members) and np.array_equal(epochs, self._epochs):
            self._age += 1
            if self._plan is None or self._age < REFRESH:
                return self._plan
        else:
            self._arrange(members, kv_lens)
            self._members, self._epochs = members.copy(), epochs
        self._age = 0
        self._plan = self._decide(members)
        return self._plan

    def _arrange(self, members: IntArray, kv_lens: IntArray) -> None:
        """Bring order and common lengths up to date."""
        rows = self._rows
        length = np.zeros(len(rows.epoch), np.int32)
        length[members] = kv_lens
        order = self._order
        stays = np.flatnonzero((length[order] > 0) & (rows.epoch[order] == self._order_epochs))
        if len(stays) < len(order):
            # What neighbours have in common beyond those that left is the least on the way.
            if len(stays) > 1:
                way = self._common[: stays[-1]]
                self._common = np.minimum.reduceat(way, stays[:-1])
            else:
                self._common = np.empty(0, np.int32)
            order = order[stays]
        known = np.zeros(len(length), np.bool_)
        known[order] = True
        new = members[~known[members]]
        if len(new) > _FEW:
            order = self._sorted(members, length[members])
            self._common = self._compare(order[:-1], order[1:], length)
        else:
            for row in new.tolist():
                order = self._insert(order, row, length)
        self._order, self._order_epochs = order, rows.epoch[order]

    def _insert(self, order: IntArray, row: int, length: IntArray) -> IntArray:
        """Put a row behind those that have most in common with it."""
        if not len(order):
            return np.array([row], np.int32)
        common, slots = self._common, self._rows.slots
        # Down the tree: ``at`` begins the run of rows that share ``most`` with the new one; which
        # of its branches has the next slot too?
        at, most = 0, self._extend(int(order[0]), row, 0, length)
        while True:
            less = np.flatnonzero(common[at:] < most)
            stop = at + int(less[0]) if len(less) else len(common)
            branches = np.flatnonzero(common[at:stop] == most) + at
            last = int(branches[0]) if len(branches) else stop
            if not len(branches) or most >= length[row] - 1:
                break
            heads = order[branches + 1]
            same = (slots[heads, most] == slots[row, most]) & (length[heads] - 1 > most)
            if not same.any():
                break
            at = int(branches[same.argmax()]) + 1
            most = self._extend(int(order[at]), row, most + 1, length)
        there = last + 1
        between = np.array([most], np.int32)
        self._common = np.concatenate((common[:last], between, common[last:]))
        return np.concatenate((order[:there], np.array([row], np.int32), order[there:]))

    def _extend(self, a: int, b: int, low: int, length: IntArray) -> int:
        """How many leading slots two rows share, ``low`` at least."""
        one, other = self._rows.slots[a], self._rows.slots[b]
        high = int(min(length[a], length[b])) - 1
        while low < high:
            middle = (low + high + 1) >> 1
            if one[middle - 1] == other[middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low

    def _compare(self, a: IntArray, b: IntArray, length: IntArray) -> IntArray:
        """How many leading slots each of rows ``a`` shares with its counterpart in ``b``. The
        newest token is always a row's own."""
        slots = self._rows.slots
        high = np.maximum(np.minimum(length[a], length[b]) - 1, 0)
        low = np.minimum(slots[a, 0] == slots[b, 0], high)
        high = np.where(low, high, 0)
        for _ in range(int(high.max(initial=0)).bit_length()):
            middle = (low + high + 1) >> 1
            at = np.maximum(middle - 1, 0)
            same = slots[a, at] == slots[b, at]
            low = np.where(same, middle, low)
            high = np.where(same, high, middle - 1)
            if (low >= high).all():
                break
        return np.minimum(low, high).astype(np.int32)

    def _sorted(self, members: IntArray, lens: IntArray) -> IntArray:
        """An order from scratch. Rows that part between two of the places looked at stand in any
        order: less is found to be shared there, never too much."""
        stride = max(1, -(-int(lens.max()) // _CHECKED))
        seen = self._rows.slots[members, : int(lens.max()) : stride].astype(">i4")
        past = np.arange(0, int(lens.max()), stride) >= lens[:, None] - 1
        seen[past] = -1
        keys = np.ascontiguousarray(seen).view(f"V{4 * seen.shape[1]}").ravel()
        return members[np.argsort(keys, kind="stable")]

    def _decide(self, members: IntArray) -> TreePlan | None:
        """Which of the common runs are worth sharing."""
        order, common, cost = self._order, self._common, self._cost
        if not len(common) or int(common.sum()) < cost.step:
            return None
        item_of = np.empty(len(self._rows.epoch), np.int32)
        item_of[members] = np.arange(len(members), dtype=np.int32)
        items = item_of[order]
        tails = np.zeros(len(members), np.int32)
        starts: list[int] = []
        ends: list[int] = []
        readers: list[IntArray] = []
        saved = 0
        work = [(0, len(order), 0)]
        while work:
            first, last, base = work.pop()
            inner = common[first : last - 1]
            count = last - first
            until, most = int(inner.min()), int(inner.max())
            if (most - base) * (count - 1) <= cost.segment + cost.reader * 2:
                continue
            gain = (until - base) * (count - 1) - cost.reader * count - cost.segment
            if gain > 0:
                group = items[first:last]
                starts.append(base)
                ends.append(until)
                readers.append(group)
                tails[group] = until
                saved += gain
                base = until
            if most == until:
                continue  # they part at one place, each from all others
            cuts = np.flatnonzero(inner == until) + (first + 1)
            begins = np.concatenate(([first], cuts))
            stops = np.concatenate((cuts, [last]))
            some = np.flatnonzero(stops - begins > 1)
            for a, b in zip(begins[some].tolist(), stops[some].tolist()):
                work.append((a, b, base))
        if saved < cost.step:
            return None
        self._version += 1
        counts = np.array([0, *map(len, readers)], np.int32)
        return TreePlan(
            version=self._version,
            starts=np.array(starts, np.int32),
            ends=np.array(ends, np.int32),
            reader_starts=np.cumsum(counts, dtype=np.int32),
            readers=np.concatenate(readers),
            tails=tails,
            saved=saved,
        )
