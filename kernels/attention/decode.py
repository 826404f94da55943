"""Paged attention for decode: one query an item, its KV cut into parts that run side by side.

Reference: `reference.attention`. The query heads of one KV head are the rows of one product (padded
to 16), so K and V are read once a group. Each part writes its output and log-sum-exp; `merge` joins
them, or nothing does when there is one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import after_previous, ceil_div, multiprocessors, power_of_two, require, start
from ..rope import slot_stride
from .merge import MOST_PARTS, merge
from .meta import AttentionMeta
from .splits import SHORTEST, choose_splits, fixed_splits
from .tile import accumulate, finish, inner_mask, scores

HEAD_BLOCK = 16
FEW = 16
"""Pairs of an item and a block of heads up to which longer tiles are faster: 3 % of a step of one
request with 1,150 tokens, 1.5B shape, on an H200."""


@triton.jit
def part_of(length, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, PART: tl.constexpr):
    """[first, last) of this program's part of a query's keys, and the first key in its window.

    PART > 0 fixes the tiles of a part; else the item's tiles are dealt out over the parts there
    are, -PART tiles at least.
    """
    split = tl.program_id(2)
    low = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    tile = low // BLOCK_N
    tiles = (length + BLOCK_N - 1) // BLOCK_N - tile
    if PART > 0:
        # Cut at multiples of the part from position 0: a window moves the ends only.
        first_part = tile // PART
        first = tl.maximum((first_part + split) * PART, tile)
        last = (first_part + split + 1) * PART
    else:
        splits = tl.num_programs(2)
        each = tl.maximum((tiles + splits - 1) // splits, -PART)
        first = tile + split * each
        last = first + each
    return first * BLOCK_N, tl.minimum(last * BLOCK_N, length), low


@triton.jit(do_not_specialize_on_alignment=["rows", "kv_lens"])
def decode_kernel(
    q,
    k_cache,
    v_cache,
    out,
    lse,
    table,
    rows,
    kv_lens,
    sinks,
    scale,
    cap,
    v_scale,
    table_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    PART: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
    PDL: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    BLOCKS: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    kv_head = tl.program_id(0) // BLOCKS
    member = (tl.program_id(0) % BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
    item = tl.program_id(1).to(tl.int64)
    items = tl.num_programs(1)
    split = tl.program_id(2)
    there = member < GROUP
    head = kv_head * GROUP + member
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    wide = inner_mask(d, D, BLOCK_D)

    length = tl.load(kv_lens + item)
    slots = table + tl.load(rows + item).to(tl.int64) * table_stride
    first, last, low = part_of(length, WINDOW, BLOCK_N, PART)
    keys = k_cache + kv_head * D + d[None, :]
    values = v_cache + kv_head * D + d[None, :]

    top = tl.full([BLOCK_H], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_H], dtype=tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], dtype=tl.float32)
    if SINKS:  # noqa: SIM102
        # A sink is one more key whose value is zero; one part alone may count it.
        if split == 0:
            top = tl.load(sinks + head, mask=there, other=0.0).to(tl.float32) * 1.4426950408889634
            total += tl.where(length > 0, 1.0, 0.0)
    after_previous(PDL)
    place = (item * HEADS + head[:, None]) * D + d[None, :]
    query = tl.load(q + place, mask=there[:, None] & wide, other=0.0)
    for begin in range(first, last, BLOCK_N):
        position = begin + n
        seen = (position < last) & (position >= low)
        slot = tl.load(slots + position, mask=position < last, other=0).to(tl.int64)
        offset = slot[:, None] * SLOT_STRIDE
        # Keys past the end come from slot 0 and are masked as scores; values must be zero there.
        k = tl.load(keys + offset, mask=wide, other=0.0).to(query.dtype)
        s = scores(query, k, scale, cap, CAPPED)
        s = tl.where(seen[None, :], s, float("-inf"))
        v = tl.load(values + offset, mask=wide & seen[:, None], other=0.0).to(query.dtype)
        top, total, acc = accumulate(s, v, top, total, acc, False)
    result, log = finish(top, total, acc)
    result *= v_scale
    row = (split * items + item) * HEADS + head
    written = there & ((last > first) | (tl.num_programs(2) == 1))
    tl.store(
        out + row[:, None] * D + d[None, :],
        result.to(out.dtype.element_ty),
        mask=written[:, None] & wide,
    )
    if LSE:
        tl.store(lse + row, log, mask=there)


def tile_shape(head_dim: int, dtype: torch.dtype, work: int = FEW + 1) -> tuple[int, int, int]:
    """(keys, warps, stages) of a tile, for so many pairs of an item and a block of heads. At 64
    keys of 128 dimensions four programs share a multiprocessor, with 32 KB of loads in flight each;
    a stage of the three is for the slots, whose loads come before those of K and V. Few pairs leave
    a multiprocessor one program, which had better ask for all its keys at once."""
    if work <= FEW and dtype != torch.float32 and head_dim <= 128:
        return 128, 4, 2
    if dtype == torch.float32:
        return 16 if head_dim > 128 else 32, 4, 3
    return 32 if head_dim > 128 else 64, 4, 3


def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMeta,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    splits: int | None = None,
    split_tokens: int = 0,
    tile: tuple[int, int, int] | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Attention of q [B, Hq, D], query i being the newest token of item i of `meta`: [B, Hq, D].

    Items from B on are not looked at. Caches [S, Hk, D] hold K / k_scale and V / v_scale, in q's
    dtype or float8; `window` w sees the last w tokens (0: all), `softcap` c gives c tanh(s / c),
    `sinks` [Hq]. `lse` [B, Hq] float32, when given, takes the natural log of the softmax's
    denominator. An item with no keys gives zeros and -inf. `split_tokens` > 0 cuts every item at
    its multiples (a multiple of the tile is used), so that results do not depend on the batch.
    Raises ValueError for shapes that do not fit.
    """
    items, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    require(q.is_contiguous(), "q must be contiguous")
    require(heads % kv_heads == 0, f"{heads} heads do not share {kv_heads} KV heads evenly")
    stride = slot_stride(k_cache, v_cache, dim)
    if out is None:
        out = torch.empty_like(q)
    if items == 0:
        return out
    blocks = kv_heads * ceil_div(heads // kv_heads, HEAD_BLOCK)
    # Where results may not depend on the batch, nor may the tile.
    work = FEW + 1 if split_tokens else items * blocks
    block_n, warps, stages = tile or tile_shape(dim, q.dtype, work)
    longest = min(meta.max_kv, window + block_n) if window else meta.max_kv
    if split_tokens:
        part = ceil_div(split_tokens, block_n)
        splits = fixed_splits(longest, part * block_n) + (1 if window else 0)
        require(splits <= MOST_PARTS, f"{splits} parts of {split_tokens} tokens are too many")
    else:
        part = -ceil_div(SHORTEST, block_n)
        if splits is None:
            splits = choose_splits(items * blocks, longest, 4 * multiprocessors(q.device))
    partial, logs = out, lse
    if splits > 1:
        partial = torch.empty(splits, items, heads, dim, dtype=torch.float32, device=q.device)
        logs = torch.empty(splits, items, heads, dtype=torch.float32, device=q.device)
    start(
        decode_kernel,
        (blocks, items, splits),
        q,
        k_cache,
        v_cache,
        partial,
        partial if logs is None else logs,
        meta.table,
        meta.rows,
        meta.kv_lens,
        q if sinks is None else sinks,
        scale * k_scale,
        softcap,
        v_scale,
        meta.table.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=dim,
        SLOT_STRIDE=stride,
        BLOCK_D=power_of_two(dim),
        BLOCK_H=HEAD_BLOCK,
        BLOCK_N=block_n,
        WINDOW=window,
        PART=part,
        CAPPED=softcap > 0,
        SINKS=sinks is not None,
        LSE=logs is not None,
        device=q.device,
        pdl=pdl,
        warps=warps,
        stages=stages,
    )
    if logs is not None and splits > 1:
        merge(partial, logs, out=out, lse_out=lse, pdl=pdl)
    return out


def cost(
    kv_tokens: int, items: int, heads: int, kv_heads: int, head_dim: int, size: int, kv_size: int
) -> tuple[int, int]:
    """(bytes moved, operations) for `kv_tokens` in all items together; partial results left out."""
    moved = 2 * kv_tokens * kv_heads * head_dim * kv_size + 2 * items * heads * head_dim * size
    return moved, 4 * kv_tokens * heads * head_dim
