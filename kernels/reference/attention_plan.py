"""Which keys each query of a step reads, worked out once for all layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch

from ..attention.meta import AttentionMeta


@dataclass(slots=True)
class Keys:
    """A group of items with equally many queries that are computed by one product.

    Their queries are rows [first, first + items * queries) of q. Each item reads ``length`` keys:
    the slots from ``start`` on, or those in ``index`` [items * length] int64. ``mask`` is added to
    the scores: [items, 1, queries, length] float32, or None where every key is seen.
    """

    first: int
    items: int
    queries: int
    length: int
    start: int = 0
    index: torch.Tensor | None = None
    mask: torch.Tensor | None = None


@dataclass(slots=True)
class Plan:
    """All pieces of a step. ``empty``: query ranges of items that have no key at all."""

    pieces: list[Keys] = field(default_factory=list[Keys])
    empty: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


def plan_for(meta: AttentionMeta, window: int) -> Plan:
    """The plan for a window size (0: all), made on first use and kept in ``meta``."""
    plan = meta.plans.get(window)
    if plan is None:
        plan = meta.plans[window] = _plan(meta, window)
    return cast("Plan", plan)


def _plan(meta: AttentionMeta, window: int) -> Plan:
    kv_lens = meta.kv_lens_host if meta.kv_lens_host is not None else meta.kv_lens.tolist()
    q_lens = meta.q_lens_host if meta.q_lens_host is not None else meta.q_start.diff().tolist()
    rows = meta.rows.tolist()
    plan = Plan()
    decodes = meta.num_decodes
    if decodes:
        plan.pieces.append(_decodes(meta, rows[:decodes], kv_lens[:decodes], window))
        plan.empty += [(i, i + 1) for i in range(decodes) if kv_lens[i] == 0]
    first = decodes
    for row, queries, kv_len in zip(rows[decodes:], q_lens[decodes:], kv_lens[decodes:]):
        if kv_len < queries:
            plan.empty.append((first, first + queries - kv_len))
        if queries and kv_len:
            plan.pieces.append(_extend(meta.table[row], first, queries, kv_len, window))
        first += queries
    return plan


def _decodes(meta: AttentionMeta, rows: list[int], kv_lens: list[int], window: int) -> Keys:
    """One query an item, padded to the longest."""
    lows = [max(0, n - window) if window else 0 for n in kv_lens]
    lengths = [n - low for n, low in zip(kv_lens, lows)]
    length = max(1, *lengths)
    if len(rows) == 1:
        return _keys(meta.table[rows[0], lows[0] : lows[0] + length], 0, 1)
    index = torch.stack(
        [meta.table[row, low : low + length] for row, low in zip(rows, lows)]
        if all(low + length <= meta.table.shape[1] for low in lows)
        else [
            torch.nn.functional.pad(part := meta.table[row, low : low + n], (0, length - len(part)))
            for row, low, n in zip(rows, lows, lengths)
        ]
    )
    mask = None
    if min(lengths) < length:
        real = (
            torch.tensor(lengths).clamp(min=1).unsqueeze(1)
        )  # an empty item is blanked afterwards
        seen = torch.arange(length) < real
        index = index.masked_fill(~seen, 0)
        mask = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)
        mask = mask.view(len(rows), 1, 1, length)
    return Keys(0, len(rows), 1, length, index=index.flatten().long(), mask=mask)


def _extend(table: torch.Tensor, first: int, queries: int, kv_len: int, window: int) -> Keys:
    """Queries of one item, each seeing the keys up to its own position."""
    begin = kv_len - queries
    low = max(0, begin + 1 - window) if window else 0
    keys = _keys(table[low:kv_len], first, queries)
    position = torch.arange(begin, kv_len).unsqueeze(1)
    at = torch.arange(low, kv_len)
    hidden = at > position
    if window:
        hidden |= at <= position - window
    if begin < 0:
        hidden[:-begin, 0] = False  # these queries have no key; they are blanked afterwards
    if queries > 1 or window:
        keys.mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        keys.mask = keys.mask.view(1, 1, queries, keys.length)
    return keys


def _keys(slots: torch.Tensor, first: int, queries: int) -> Keys:
    """Keys of one item: a run of slots where they follow each other, else an index."""
    length, start = len(slots), int(slots[0])
    run = int(slots[-1]) - start == length - 1 and bool((slots.diff() == 1).all())
    return Keys(first, 1, queries, length, start, None if run else slots.long())
