"""Which keys each query of a step reads, worked out once for all layers.

Decoding items that begin in the same slots share them: their common run is read once for all of
them, at every level at which they part, and the results are merged with what each reads alone::

    positions   0 ........ 256 ....... 300
    item 0      [ shared by 0 1 2 ][ own  ]        two products for the three items:
    item 1      [                 ][ own     ]     all queries x shared keys,
    item 2      [                 ][ own ]         each query x its own, padded to the longest
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from ..attention.meta import Ancestry, AttentionMeta

# Sharing costs a few small operations a layer; it pays from this many keys not read again.
SHARING_PAYS = 512
# Items of one product are padded to the longest: they may differ by this factor, and some keys.
_PADDING, _SLACK = 1.5, 32

# Up to so many queries of an item are one masked product.
FEW = 8

Slots = npt.NDArray[np.int32]
At = slice | torch.Tensor


@dataclass(slots=True)
class Keys:
    """Items [n] with one query each and ``length`` keys each, or one item with several queries.

    ``at``: which rows of q. The keys are the slots from ``start`` on, or those in ``index``
    [n * length] int64. ``mask`` [n, 1, queries, length] float32 is added to scores: -inf for
    padding, and for what few queries do not see (many make their masks block by block).
    """

    at: At
    items: int
    length: int
    start: int = 0
    index: torch.Tensor | None = None
    mask: torch.Tensor | None = None

    def of(self, cache: torch.Tensor) -> torch.Tensor:
        """[items, length, Hk, D] of a cache [slots, Hk, D]; a view where the slots are one run."""
        if self.index is None:
            rows = cache[self.start : self.start + self.length]
        else:
            rows = cache.index_select(0, self.index)
        return rows.view(self.items, self.length, *cache.shape[1:])


@dataclass(slots=True)
class Extend:
    """Queries [first, last) of q, the last ones of ``kv_len`` positions of one item. ``keys`` hold
    the positions from ``low`` on: what lies before is out of every query's window. Of an item that
    is a tree, ``hidden`` [queries, n] says what of the last n keys each query does not see,
    whatever the reason; it sees all others."""

    first: int
    last: int
    kv_len: int
    low: int
    keys: Keys
    hidden: torch.Tensor | None = None


@dataclass(slots=True)
class Plan:
    """All of a step. ``shared`` keys are read by several decoding items, after their own."""

    own: list[Keys] = field(default_factory=list[Keys])
    shared: list[Keys] = field(default_factory=list[Keys])
    extends: list[Extend] = field(default_factory=list[Extend])
    empty: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Query ranges that have no key at all."""

    @property
    def simple(self) -> Keys | None:
        """The one product that is the whole step, where that is so."""
        lone = len(self.own) == 1 and not (self.shared or self.extends or self.empty)
        return self.own[0] if lone else None


def plan_for(meta: AttentionMeta, window: int) -> Plan:
    """The plan for a window size (0: all), made on first use and kept in ``meta``."""
    if window >= meta.max_kv:
        window = 0
    plan = meta.plans.get(window)
    if plan is None:
        plan = meta.plans[window] = _plan(meta, window)
    return cast("Plan", plan)


def _plan(meta: AttentionMeta, window: int) -> Plan:
    kv_lens = meta.kv_lens_host if meta.kv_lens_host is not None else meta.kv_lens.tolist()
    q_lens = meta.q_lens_host if meta.q_lens_host is not None else meta.q_start.diff().tolist()
    table = meta.table.numpy()
    lines = [table[row] for row in meta.rows.tolist()]
    plan = Plan()
    decodes = meta.num_decodes
    if decodes:
        _Decodes(plan, lines[:decodes], kv_lens[:decodes]).arrange(window)
    first = decodes
    for item in range(decodes, len(lines)):
        line, queries, kv_len = lines[item], q_lens[item], kv_lens[item]
        last = first + queries
        if kv_len < queries:
            plan.empty.append((first, last - kv_len))
            first = last - kv_len
        if meta.ancestry is not None and int(meta.ancestry.starts[item]) < kv_len:
            keys = _keys(line[:kv_len], slice(first, last))
            hidden = _unseen(meta.ancestry, item, last - first, kv_len, window)
            if last - first <= FEW:
                keys.mask = torch.zeros(last - first, kv_len)
                keys.mask[:, kv_len - hidden.shape[1] :].masked_fill_(hidden, -torch.inf)
                keys.mask = keys.mask[None, None]
            plan.extends.append(Extend(first, last, kv_len, 0, keys, hidden))
        elif last > first:
            low = max(0, kv_len - (last - first) + 1 - window) if window else 0
            keys = _keys(line[low:kv_len], slice(first, last))
            if last - first <= FEW:
                keys.mask = _causal(last - first, kv_len, low, window)
            plan.extends.append(Extend(first, last, kv_len, low, keys))
        first = last
    return plan


def _causal(queries: int, kv_len: int, low: int, window: int) -> torch.Tensor:
    """[1, 1, queries, keys] float32: -inf where a key is after a query or out of its window."""
    at = torch.arange(low, kv_len)
    position = torch.arange(kv_len - queries, kv_len).unsqueeze(1)
    hidden = at > position
    if window:
        hidden |= at <= position - window
    return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[None, None]


def _unseen(ancestry: Ancestry, item: int, queries: int, kv_len: int, window: int) -> torch.Tensor:
    """[queries, n] bool: which of the last n keys of a tree each of its last ``queries`` tokens
    does not see. Without a window n are its nodes, else all keys."""
    start, begin = int(ancestry.starts[item]), int(ancestry.offsets[item])
    count = kv_len - start
    query = torch.arange(kv_len - queries, kv_len).unsqueeze(1)
    node = torch.arange(count)
    hidden = (query - start < node) | (query - start >= ancestry.ends[begin : begin + count])
    if kv_len - queries < start:  # some come before the nodes, and see what comes before them
        hidden = torch.cat([torch.arange(kv_len - queries, start) > query, hidden], dim=1)
    if window:
        place = torch.arange(kv_len)
        place[start:] = start + ancestry.depths[begin : begin + count]
        all_hidden = place <= place[kv_len - queries :].unsqueeze(1) - window
        all_hidden[:, kv_len - hidden.shape[1] :] |= hidden
        return all_hidden
    return hidden


class _Decodes:
    """Splits the keys of decoding items into shared and own runs."""

    def __init__(self, plan: Plan, lines: list[Slots], kv_lens: list[int]) -> None:
        self.plan, self.lines, self.kv_lens = plan, lines, kv_lens
        self.lows = [0] * len(lines)
        """Where each item's own keys begin."""

    def arrange(self, window: int) -> None:
        items = [i for i, n in enumerate(self.kv_lens) if n > 0]
        self.plan.empty += [(i, i + 1) for i, n in enumerate(self.kv_lens) if n == 0]
        if window:
            self.lows = [max(0, n - window) for n in self.kv_lens]
        elif len(items) > 1:
            self._share(items, 0, 0)
        self._own(items)

    def _share(self, items: list[int], base: int, at: int) -> None:
        """Find what items have in common beyond ``at``; up to ``base`` it is taken care of."""
        by_slot: dict[int, list[int]] = {}
        for item in items:
            # The last key stays an item's own, so that it has one.
            if self.kv_lens[item] > at + 1:
                by_slot.setdefault(int(self.lines[item][at]), []).append(item)
        for group in by_slot.values():
            if len(group) < 2:
                continue
            end = min(self.kv_lens[i] for i in group) - 1
            block = np.stack([self.lines[i][at:end] for i in group])
            differs = (block != block[0]).any(axis=0)
            until = at + int(differs.argmax()) if differs.any() else end
            begin = base
            if (len(group) - 1) * (until - base) >= SHARING_PAYS:
                self.plan.shared.append(_keys(self.lines[group[0]][base:until], _at(group)))
                begin = until
                for item in group:
                    self.lows[item] = until
            self._share(group, begin, until)

    def _own(self, items: list[int]) -> None:
        """Products of items that have about equally many keys of their own."""
        lengths = {i: self.kv_lens[i] - self.lows[i] for i in items}
        items = sorted(items, key=lambda i: lengths[i])
        while items:
            limit = lengths[items[0]] * _PADDING + _SLACK
            some = [i for i in items if lengths[i] <= limit]
            items = items[len(some) :]
            some.sort()
            self.plan.own.append(self._padded(some, [lengths[i] for i in some]))

    def _padded(self, items: list[int], lengths: list[int]) -> Keys:
        length = max(lengths)
        if len(items) == 1:
            low = self.lows[items[0]]
            return _keys(self.lines[items[0]][low : low + length], _at(items))
        index = np.zeros((len(items), length), dtype=np.int64)
        for line, item, n in zip(index, items, lengths):
            low = self.lows[item]
            line[:n] = self.lines[item][low : low + n]
            line[n:] = line[0]  # a key of its own: another's may be NaN, which no mask hides
        mask = None
        if min(lengths) < length:
            seen = torch.arange(length) < torch.tensor(lengths).unsqueeze(1)
            mask = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)
            mask = mask.view(len(items), 1, 1, length)
        return Keys(
            _at(items), len(items), length, index=torch.from_numpy(index.ravel()), mask=mask
        )


def _at(items: list[int]) -> At:
    """Rows of q: a slice where they follow each other."""
    if items[-1] - items[0] == len(items) - 1:
        return slice(items[0], items[-1] + 1)
    return torch.tensor(items)


def _keys(slots: Slots, at: At) -> Keys:
    """One run of keys: where the slots follow each other, no index is needed."""
    length, start = len(slots), int(slots[0])
    run = int(slots[-1]) - start == length - 1 and bool((np.diff(slots) == 1).all())
    index = None if run else torch.from_numpy(slots.astype(np.int64))
    return Keys(at, 1, length, start, index)
