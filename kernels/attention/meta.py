"""Who attends to what in one step: the tensors that every attention kernel reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .tree import TreeWork


@dataclass(slots=True)
class Ancestry:
    """Items whose last tokens are nodes of a tree, depth first: a node sees what comes before all
    nodes, its ancestors and itself. Of the item's nodes, node j is an ancestor of (or is) nodes
    [j, ends[j]), so a query that is node i sees key j <= i where i < ends[j]."""

    starts: torch.Tensor
    """[B] int32, how many of an item's tokens come before its nodes; kv_len or more: it has none"""
    offsets: torch.Tensor
    """[B] int32, where in `ends` and `depths` an item's nodes begin"""
    ends: torch.Tensor
    """[N] int32"""
    depths: torch.Tensor
    """[N] int32, starts[i] + depths[j] is the position of node j: windows count by it"""


@dataclass(slots=True)
class AttentionMeta:
    """B items with ragged queries, packed one after the other, over paged KV.

    Item i has queries [q_start[i], q_start[i+1]); they are the last ones of its ``kv_lens[i]``
    tokens, so query j of item i stands at position kv_lens[i] - q_len[i] + j and sees positions up
    to its own (but see `ancestry`). The KV of position p of item i lies in slot
    ``table[rows[i], p]``."""

    table: torch.Tensor
    """[R, C] int32, slots by row and position."""
    rows: torch.Tensor
    """[B] int32"""
    q_start: torch.Tensor
    """[B + 1] int32"""
    kv_lens: torch.Tensor
    """[B] int32"""
    max_q: int
    """An upper bound on any q_len."""
    max_kv: int
    """An upper bound on any kv_len."""
    num_decodes: int = 0
    """The first so many items have one query each."""
    tree: TreeWork | None = None
    """Where all items decode: who reads which keys, so that shared ones are read once."""
    ancestry: Ancestry | None = None
    """Where some items that do not decode are trees."""
    q_lens_host: list[int] | None = None
    """q_len of each item, where the host knows them (CPU paths)."""
    kv_lens_host: list[int] | None = None
    runs_host: list[int] | None = None
    """Where the KV of an item lies in consecutive slots, as far as the host knows, the first of
    them; else -1."""
    plans: dict[int, object] = field(default_factory=dict[int, object])
    """What an implementation worked out once for all layers of this step, by window size."""
