"""Paged attention for decode over a tree: keys that several items share are read once for all.

Reference: `reference.tree`. The work is a list in device memory (`worklist`), walked by a fixed
number of programs, so a captured step shares as its list says. A piece of a segment stacks the
query heads of all its readers as rows of one product; a piece of a tail has one item's heads, as in
`decode`. Both leave parts, which the last kernel merges by their log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from ..launch import after_previous, multiprocessors, power_of_two, require, start
from ..rope import slot_stride
from .decode import HEAD_BLOCK, tile_shape
from .tile import accumulate, finish, inner_mask, scores
from .worklist import FIELDS, IntArray, ListShape, WorkList, list_shape

SHARED_PROGRAMS, TAIL_PROGRAMS = 2, 4
"""Programs of either kernel that a multiprocessor runs at once."""
MOST_GROUP = 64
"""Query heads of a KV head, at most."""


@dataclass(slots=True)
class TreeWork:
    """A work list on the device and memory for its parts; every layer of a step uses the same."""

    shape: ListShape
    counts: torch.Tensor
    """[2] int32"""
    shared: torch.Tensor
    """[most_shared * 8] int32, as in `WorkList`"""
    readers: torch.Tensor
    tails: torch.Tensor
    offsets: torch.Tensor
    """[most_items + 1] int32"""
    partial: torch.Tensor
    """[most_parts, Hq, D] float32"""
    logs: torch.Tensor
    """[most_parts, Hq] float32"""

    def fill(self, work: WorkList) -> None:
        """Enter a list, by copies that wait for the host."""
        fields = (self.counts, self.shared, self.readers, self.tails, self.offsets)
        for field, (array, rest) in zip(fields, work.padded(self.shape)):
            field.copy_(torch.from_numpy(np.concatenate((array, rest))))


def shared_tile(head_dim: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """(rows, keys, warps, stages) of a piece of a segment."""
    if dtype == torch.float32:
        return 16, 16 if head_dim > 128 else 32, 4, 3
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
    return list_shape(
        heads, kv_heads, rows, keys, most_items, multiprocessors(device),
        SHARED_PROGRAMS, TAIL_PROGRAMS,
    )  # fmt: skip


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
    fields = [torch.zeros(size, dtype=torch.int32, device=device) for size in shape.sizes]
    counts, shared, readers, tails, offsets = fields
    partial, logs = parts_for(shape, head_dim, device)
    return TreeWork(shape, counts, shared, readers, tails, offsets, partial, logs)


@triton.jit
def keys_of(
    query,
    slots,
    keys,
    values,
    first,
    last,
    scale,
    cap,
    wide,
    SLOT_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Attention of query [M, D] to the positions [first, last) of a row's slots: `finish`'s."""
    n = tl.arange(0, BLOCK_N)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for begin in range(first, last, BLOCK_N):
        position = begin + n
        seen = position < last
        slot = tl.load(slots + position, mask=seen, other=0).to(tl.int64)
        offset = slot[:, None] * SLOT_STRIDE
        # Keys past the end come from slot 0 and are masked as scores; values must be zero there.
        k = tl.load(keys + offset, mask=wide, other=0.0).to(query.dtype)
        s = scores(query, k, scale, cap, CAPPED)
        s = tl.where(seen[None, :], s, float("-inf"))
        v = tl.load(values + offset, mask=wide & seen[:, None], other=0.0).to(query.dtype)
        top, total, acc = accumulate(s, v, top, total, acc, False)
    return finish(top, total, acc)


@triton.jit
def tree_kernel(
    q,
    k_cache,
    v_cache,
    partial,
    logs,
    table,
    kv_lens,
    counts,
    shared,
    readers,
    tails,
    scale,
    cap,
    v_scale,
    table_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    SHARED_N: tl.constexpr,
    TAIL_N: tl.constexpr,
    FIELDS: tl.constexpr,
    CAPPED: tl.constexpr,
    SHARED: tl.constexpr,
    TAILS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Walks the pieces of segments (SHARED), then those of tails (TAILS)."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    BLOCKS: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    d = tl.arange(0, BLOCK_D)
    wide = inner_mask(d, D, BLOCK_D)
    shared_units = tl.load(counts) * KV_HEADS
    tail_units = tl.load(counts + 1) * (KV_HEADS * BLOCKS)
    # A kernel of tails alone comes after the one of segments, which has waited for what both read,
    # and neither reads what the other writes: they may overlap, and the wait is at its end.
    if SHARED:
        after_previous(PDL)
        for unit in range(program, shared_units, programs):
            entry = shared + (unit // KV_HEADS) * FIELDS
            kv_head = unit % KV_HEADS
            slots = table + tl.load(entry).to(tl.int64) * table_stride
            first = tl.load(entry + 1)
            last = tl.load(entry + 2)
            r = tl.load(entry + 3) + tl.arange(0, BLOCK_M)
            there = r < tl.load(entry + 4)
            who = readers + (tl.load(entry + 5) + r // GROUP) * 2
            item = tl.load(who, mask=there, other=0).to(tl.int64)
            part = (tl.load(who + 1, mask=there, other=0) + tl.load(entry + 6)).to(tl.int64)
            head = kv_head * GROUP + r % GROUP
            query = tl.load(
                q + (item * HEADS + head)[:, None] * D + d[None, :],
                mask=there[:, None] & wide,
                other=0.0,
            )
            result, log = keys_of(
                query, slots, k_cache + kv_head * D + d[None, :],
                v_cache + kv_head * D + d[None, :], first, last, scale, cap, wide,
                SLOT_STRIDE, BLOCK_M, SHARED_N, BLOCK_D, CAPPED,
            )  # fmt: skip
            place = part * HEADS + head
            tl.store(
                partial + place[:, None] * D + d[None, :],
                result * v_scale,
                mask=there[:, None] & wide,
            )
            tl.store(logs + place, log, mask=there)
    if TAILS:
        begin = program
        if SHARED:
            # Who has had fewer pieces of segments goes on first.
            begin += (tl.maximum(shared_units - program, 0) + programs - 1) // programs * programs
            begin -= shared_units
        for unit in range(begin, tail_units, programs):
            entry = tails + (unit // (KV_HEADS * BLOCKS)) * FIELDS
            kv_head = unit % (KV_HEADS * BLOCKS) // BLOCKS
            member = unit % BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
            own = member < GROUP
            slots = table + tl.load(entry).to(tl.int64) * table_stride
            lone = tl.load(entry + 1).to(tl.int64)
            low = tl.load(entry + 2)
            piece = tl.load(entry + 3)
            length = tl.load(kv_lens + lone)
            tiles = (tl.maximum(length - low, 0) + TAIL_N - 1) // TAIL_N
            pieces = tl.load(entry + 4)
            each = (tiles + pieces - 1) // pieces * TAIL_N
            first = low + piece * each
            last = tl.minimum(first + each, length)
            head = kv_head * GROUP + member
            query = tl.load(
                q + (lone * HEADS + head)[:, None] * D + d[None, :],
                mask=own[:, None] & wide,
                other=0.0,
            )
            result, log = keys_of(
                query, slots, k_cache + kv_head * D + d[None, :],
                v_cache + kv_head * D + d[None, :], first, last, scale, cap, wide,
                SLOT_STRIDE, BLOCK_H, TAIL_N, BLOCK_D, CAPPED,
            )  # fmt: skip
            place = tl.load(entry + 5).to(tl.int64) * HEADS + head
            tl.store(
                partial + place[:, None] * D + d[None, :],
                result * v_scale,
                mask=own[:, None] & wide & (last > first),
            )
            tl.store(logs + place, log, mask=own)
        if not SHARED:
            after_previous(PDL)


@triton.jit
def merge_lists_kernel(
    partial,
    logs,
    offsets,
    sinks,
    out,
    lse,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
    PDL: tl.constexpr,
):
    item = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    c = tl.arange(0, CHUNK)
    first = tl.load(offsets + item)
    last = tl.load(offsets + item + 1)
    top = tl.full([1], float("-inf"), dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)
    acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    after_previous(PDL)
    for begin in range(first, last, CHUNK):
        part = begin + c
        place = part.to(tl.int64) * HEADS + head
        log = tl.load(logs + place, mask=part < last, other=float("-inf"))
        # A part without keys is not written: only its log-sum-exp is.
        some = log > float("-inf")
        value = tl.load(
            partial + place[:, None] * D + d[None, :],
            mask=some[:, None] & (d < D)[None, :],
            other=0.0,
        )
        highest = tl.maximum(top, tl.max(log, axis=0))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp(log - base)
        decay = tl.exp(top - base)
        total = total * decay + tl.sum(weight, axis=0)
        acc = acc * decay + tl.sum(value * weight[:, None], axis=0)
        top = highest
    seen = total > 0.0
    if SINKS:
        # A sink is one more key whose value is zero.
        sink = tl.load(sinks + head).to(tl.float32)
        highest = tl.maximum(top, sink)
        decay = tl.exp(top - highest)
        total = total * decay + tl.where(seen, tl.exp(sink - highest), 0.0)
        acc *= decay
        top = highest
    divisor = tl.where(seen, total, 1.0)
    row = item * HEADS + head
    result = tl.where(seen, acc / divisor, 0.0)
    tl.store(out + row * D + d, result.to(out.dtype.element_ty), mask=d < D)
    if LSE:
        one = tl.arange(0, 1)
        tl.store(lse + row + one, tl.where(seen, top + tl.log(divisor), float("-inf")))


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
    together: bool = False,
    pdl: bool = False,
) -> torch.Tensor:
    """`decode` of q [B, Hq, D] by the list in ``work``, which says who reads what: [B, Hq, D].

    ``table`` [R, C] int32 and ``kv_lens`` [B] int32 are those of `AttentionMeta`; tails reach up to
    kv_lens. Items that the list does not know give zeros (and -inf in ``lse``). Every query sees
    all keys of its item: no window. ``tile`` must be that of the list's shape. ``together``: one
    kernel for segments and tails. The rest is as in `decode`. Raises ValueError for shapes that do
    not fit.
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
    tail_keys, tail_warps, tail_stages = tile_shape(dim, q.dtype)
    kinds = (
        [(True, True, warps, stages, shape.shared_units)]
        if together
        else [
            (True, False, warps, stages, shape.shared_units),
            (False, True, tail_warps, tail_stages, shape.tail_units),
        ]
    )
    for has_shared, has_tails, some_warps, some_stages, programs in kinds:
        start(
            tree_kernel,
            (programs,),
            q,
            k_cache,
            v_cache,
            work.partial,
            work.logs,
            table,
            kv_lens,
            work.counts,
            work.shared,
            work.readers,
            work.tails,
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
            BLOCK_H=HEAD_BLOCK,
            SHARED_N=keys,
            TAIL_N=tail_keys,
            FIELDS=FIELDS,
            CAPPED=softcap > 0,
            SHARED=has_shared,
            TAILS=has_tails,
            device=q.device,
            pdl=pdl,
            warps=some_warps,
            stages=some_stages,
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
        CHUNK=16,
        SINKS=sinks is not None,
        LSE=lse is not None,
        device=q.device,
        pdl=pdl,
        warps=4,
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
    own = int((kv_lens[tails[:, 1]] - tails[:, 2]).sum())
    pairs = int(keys @ (once[:, 4] // (heads // kv_heads))) + own
    moved = 2 * (int(keys.sum()) + own) * kv_heads * head_dim * kv_size
    moved += 2 * len(kv_lens) * heads * head_dim * size
    return moved, 4 * pairs * heads * head_dim
