"""Paged attention for decode over a tree: keys that several items share are read once for all.

Reference: `reference.tree`. The work is a list in device memory (`worklist`); a program takes one
entry, and those beyond the list's end leave at once, so a captured step shares as its list says. A
piece of a segment stacks the query heads of all its readers as rows of one product; a piece of a
tail has one item's heads. Segments are bound by products and tails by memory: in one launch they
run side by side. Both leave parts, which a second kernel merges by their log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..launch import ceil_div, multiprocessors, power_of_two, require, start
from ..rope import slot_stride
from .tree_kernels import merge_lists_kernel, pieces_kernel
from .worklist import FIELDS, IntArray, ListShape, WorkList, list_shape

MOST_GROUP = 64
"""Query heads of a KV head, at most."""


@dataclass(slots=True)
class TreeWork:
    """A work list on the device and memory for its parts; every layer of a step uses the same."""

    shape: ListShape
    count: torch.Tensor
    """[1] int32"""
    pieces: torch.Tensor
    """[most_pieces * 8] int32, as in `WorkList`"""
    readers: torch.Tensor
    offsets: torch.Tensor
    """[most_items + 1] int32"""
    partial: torch.Tensor
    """[most_parts, Hq, D] float32"""
    logs: torch.Tensor
    """[most_parts, Hq] float32"""

    def fill(self, work: WorkList) -> None:
        """Enter a list, by copies that wait for the host."""
        fields = (self.count, self.pieces, self.readers, self.offsets)
        for field, (array, rest) in zip(fields, work.padded(self.shape)):
            field.copy_(torch.from_numpy(np.concatenate((array, rest))))


def shared_tile(head_dim: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """(rows, keys, warps, stages) of a piece of a segment."""
    if dtype == torch.float32:
        return (16, 16, 4, 3) if head_dim > 128 else (32, 32, 8, 2)
    if head_dim > 128:
        return 64, 32, 8, 3
    return 64, 64, 4, 3


def shape_for(
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    most_items: int,
    device: torch.device,
    tile: tuple[int, int, int, int] | None = None,
) -> ListShape:
    """How `tree_decode` wants its lists. Raises ValueError for more than `MOST_GROUP` heads of one
    KV head."""
    require(heads % kv_heads == 0, f"{heads} heads do not share {kv_heads} KV heads evenly")
    group = heads // kv_heads
    require(group <= MOST_GROUP, f"{group} heads of one KV head are more than {MOST_GROUP}")
    rows, keys, _, _ = tile or shared_tile(head_dim, dtype)
    return list_shape(heads, kv_heads, rows, keys, most_items, multiprocessors(device))


def parts_for(
    shape: ListShape, head_dim: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(partial, logs) of a `TreeWork`: steps that do not run at once may use the same."""
    heads = shape.kv_heads * shape.group
    return (
        torch.empty(shape.most_parts, heads, head_dim, dtype=torch.float32, device=device),
        torch.empty(shape.most_parts, heads, dtype=torch.float32, device=device),
    )


def work_for(shape: ListShape, head_dim: int, device: torch.device) -> TreeWork:
    """Buffers of their own for lists of a shape; the list is empty."""
    fields = (torch.zeros(size, dtype=torch.int32, device=device) for size in shape.sizes)
    count, pieces, readers, offsets = fields
    return TreeWork(shape, count, pieces, readers, offsets, *parts_for(shape, head_dim, device))


def tree_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    kv_lens: torch.Tensor,
    work: TreeWork,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    tile: tuple[int, int, int, int] | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """`decode` of q [B, Hq, D] by the list in ``work``, which says who reads what: [B, Hq, D].

    ``table`` [R, C] int32 and ``kv_lens`` [B] int32 are those of `AttentionMeta`; tails reach up to
    kv_lens. Items that the list does not know give zeros (and -inf in ``lse``). Every query sees
    all keys of its item: no window. ``tile`` must be that of the list's shape. The rest is as in
    `decode`. Raises ValueError for shapes that do not fit.
    """
    items, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    shape = work.shape
    require(q.is_contiguous(), "q must be contiguous")
    require(
        (shape.kv_heads, shape.group * shape.kv_heads) == (kv_heads, heads),
        f"a list for {shape.kv_heads} KV heads with {shape.group} each, not {heads} on {kv_heads}",
    )
    require(items <= shape.most_items, f"{items} items are more than {shape.most_items}")
    require(work.partial.shape[1:] == q.shape[1:], "parts must be [P, Hq, D]")
    stride = slot_stride(k_cache, v_cache, dim)
    rows, keys, warps, stages = tile or shared_tile(dim, q.dtype)
    require(rows == shape.block_rows, f"a list for blocks of {shape.block_rows} rows, not {rows}")
    if out is None:
        out = torch.empty_like(q)
    if items == 0:
        return out
    start(
        pieces_kernel,
        (kv_heads * ceil_div(shape.group, rows), shape.most_pieces),
        q,
        k_cache,
        v_cache,
        work.partial,
        work.logs,
        table,
        kv_lens,
        work.count,
        work.pieces,
        work.readers,
        scale * k_scale,
        softcap,
        v_scale,
        table.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=dim,
        SLOT_STRIDE=stride,
        BLOCK_D=power_of_two(dim),
        BLOCK_M=rows,
        BLOCK_N=keys,
        FIELDS=FIELDS,
        CAPPED=softcap > 0,
        device=q.device,
        pdl=pdl,
        warps=warps,
        stages=stages,
    )
    start(
        merge_lists_kernel,
        (items, heads),
        work.partial,
        work.logs,
        work.offsets,
        q if sinks is None else sinks,
        out,
        work.logs if lse is None else lse,
        HEADS=heads,
        D=dim,
        BLOCK_D=power_of_two(dim),
        CHUNK=32,
        SINKS=sinks is not None,
        LSE=lse is not None,
        device=q.device,
        pdl=pdl,
        warps=1,
    )
    return out


def cost(
    work: WorkList,
    kv_lens: IntArray,
    heads: int,
    kv_heads: int,
    head_dim: int,
    size: int,
    kv_size: int,
) -> tuple[int, int]:
    """(bytes moved, operations) of a list: keys and values once a segment and once a tail, queries
    and results once; parts are left out, as they stay in the second-level cache.

    Floor of a layer = max(bytes / bandwidth, operations / product rate): a segment of 8k keys with
    64 readers of 6 heads a KV head does 384 operations a byte, and is bound by products."""
    once = work.shared[work.shared[:, 3] == 0]
    keys = (once[:, 2] - once[:, 1]).astype(np.int64)
    tails = work.tails[work.tails[:, 3] == 0]
    own = int((kv_lens[tails[:, 5]] - tails[:, 1]).sum())
    pairs = int(keys @ (once[:, 4] // (heads // kv_heads))) + own
    moved = 2 * (int(keys.sum()) + own) * kv_heads * head_dim * kv_size
    moved += 2 * len(kv_lens) * heads * head_dim * size
    return moved, 4 * pairs * heads * head_dim
