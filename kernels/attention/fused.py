"""A decode step's rotary embedding, KV write, attention and merge as one kernel, for small batches.

Reference: `reference.rope`, then `reference.attention`. The newest key and value never wait for
memory: the program whose part ends with them makes them, stores them for later steps, and takes
them into its sums itself. Each program asks for its first tile of older keys before it waits for
the kernel that makes q. The last program of a group to end merges it, or `merge` does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import (
    after_previous,
    ceil_div,
    dependent_launch,
    fetch_ahead,
    multiprocessors,
    power_of_two,
    require,
    start,
)
from ..rope import rotated, slot_stride
from .merge import merge
from .meta import AttentionMeta
from .splits import choose_splits
from .tile import accumulate, finish, inner_mask, scores

LARGEST_GROUP = 16
SHORTEST = 128
MERGED_AT_ONCE = 8
FETCHED = tl.constexpr(1024)
"""Bytes that one instruction brings into the cache."""


@triton.jit
def load_tile(
    keys, values, slots, begin, last, low, wide,
    SLOT_STRIDE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(k, v, which of them are seen) of one tile of older keys."""
    position = begin + tl.arange(0, BLOCK_N)
    seen = (position < last) & (position >= low)
    slot = tl.load(slots + position, mask=position < last, other=0).to(tl.int64)
    offset = slot[:, None] * SLOT_STRIDE
    mask = wide & seen[:, None]
    k = tl.load(keys + offset, mask=mask, other=0.0)
    v = tl.load(values + offset, mask=mask, other=0.0)
    return k, v, seen


@triton.jit
def merge_group(
    partial, lse, out, item, items, kv_head, parts,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_P: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one group of heads into `out`. Loads pass by the first-level cache."""
    g = tl.arange(0, BLOCK_G)
    p = tl.arange(0, BLOCK_P)
    d = tl.arange(0, BLOCK_D)
    row = item * HEADS + kv_head * GROUP + g
    there = g < GROUP
    each = tl.load(
        lse + p[:, None].to(tl.int64) * items * HEADS + row[None, :],
        mask=(p < parts)[:, None] & there[None, :],
        other=float("-inf"),
        cache_modifier=".cg",
    )
    top = tl.max(each, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(each - top[None, :]), axis=0)
    acc = tl.zeros([BLOCK_G, BLOCK_D], dtype=tl.float32)
    c = tl.arange(0, CHUNK)
    for first in range(0, parts, CHUNK):
        rows = (first + c)[:, None].to(tl.int64) * items * HEADS + row[None, :]
        mask = (first + c < parts)[:, None] & there[None, :]
        one = tl.load(lse + rows, mask=mask, other=float("-inf"), cache_modifier=".cg")
        value = tl.load(
            partial + rows[:, :, None] * D + d[None, None, :],
            mask=mask[:, :, None] & (d < D)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        acc += tl.sum(value * tl.exp(one - top[None, :])[:, :, None], axis=0)
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    place = out + row[:, None] * D + d[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=there[:, None] & (d < D)[None, :])


@triton.jit(
    do_not_specialize=["splits"],
    do_not_specialize_on_alignment=["rows", "kv_lens"],
)
def fused_decode_kernel(
    qkv, cos_sin, k_cache, v_cache, out, partial, lse, counters, table, rows, kv_lens,
    q_norm, k_norm, sinks, ahead, more, eps, offset, scale, cap, k_inverse, v_inverse, v_scale,
    table_stride, splits, ahead_size, more_size,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    MERGED: tl.constexpr,
    WINDOW: tl.constexpr,
    LEAST: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    NORM: tl.constexpr,
    AHEAD: tl.constexpr,
    TAIL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head = tl.program_id(0)
    item = tl.program_id(1).to(tl.int64)
    items = tl.num_programs(1)
    split = tl.program_id(2)
    if AHEAD:  # noqa: SIM102
        if split >= splits:
            pairs = items * KV_HEADS
            worker = (split - splits) * pairs + tl.program_id(1) * KV_HEADS + kv_head
            workers = (tl.num_programs(2) - splits) * pairs
            fetch_ahead(ahead, ahead_size, worker, workers, FETCHED)
            fetch_ahead(more, more_size, worker, workers, FETCHED)
    d = tl.arange(0, BLOCK_D)
    wide = inner_mask(d, D, BLOCK_D)
    member = tl.arange(0, BLOCK_H)
    there = member < GROUP

    # Keys [low, length) in tiles, dealt out over the parts; `parts` of them have work.
    length = tl.load(kv_lens + item)
    slots = table + tl.load(rows + item).to(tl.int64) * table_stride
    low = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    tile = low // BLOCK_N
    tiles = (length + BLOCK_N - 1) // BLOCK_N - tile
    each = tl.maximum((tiles + splits - 1) // splits, LEAST)
    parts = (tiles + each - 1) // each
    first = (tile + split * each) * BLOCK_N
    newest = length - 1
    last = tl.minimum(first + each * BLOCK_N, length)
    owner = (first <= newest) & (newest < last)
    last = tl.minimum(last, newest)

    keys = k_cache + kv_head * D + d[None, :]
    values = v_cache + kv_head * D + d[None, :]
    k, v, seen = load_tile(keys, values, slots, first, last, low, wide, SLOT_STRIDE, BLOCK_N)  # pyright: ignore
    slot = tl.load(slots + newest, mask=owner, other=0).to(tl.int64)
    angles = cos_sin + tl.maximum(newest, 0).to(tl.int64) * R
    after_previous(PDL)

    row = qkv + item * ((HEADS + 2 * KV_HEADS) * D)
    head = kv_head * GROUP + member
    q = rotated(row + head * D, there, q_norm, angles, eps, offset, D, R, BLOCK_D, NORM)
    q = q.to(qkv.dtype.element_ty)
    one = tl.arange(0, 1)
    mine = (one == 0) & owner
    new_key = row + (HEADS + kv_head + one) * D
    new_k = rotated(new_key, mine, k_norm, angles, eps, offset, D, R, BLOCK_D, NORM)
    new_k = (new_k * k_inverse).to(k_cache.dtype.element_ty)
    new_v = tl.load(
        new_key[:, None] + KV_HEADS * D + d[None, :], mask=mine[:, None] & wide, other=0.0
    )
    new_v = (new_v.to(tl.float32) * v_inverse).to(v_cache.dtype.element_ty)
    new_place = slot * SLOT_STRIDE + 0 * one[:, None]
    tl.store(keys + new_place, new_k, mask=mine[:, None] & wide)
    tl.store(values + new_place, new_v, mask=mine[:, None] & wide)

    # The newest key, and the sink where there is one, begin the sums; -inf where neither is here.
    s = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), axis=1)
    if CAPPED:
        s = (2.0 * tl.sigmoid(s * (2.0 * scale / cap)) - 1.0) * (cap * 1.4426950408889634)
    else:
        s *= scale * 1.4426950408889634
    top = tl.where(owner, s, float("-inf"))
    total = tl.where(owner, 1.0, tl.zeros([BLOCK_H], dtype=tl.float32))
    acc = total[:, None] * new_v.to(tl.float32)
    if SINKS:
        sink = tl.load(sinks + head, mask=there, other=0.0).to(tl.float32) * 1.4426950408889634
        sink = tl.where((split == 0) & (length > 0), sink, float("-inf"))
        highest = tl.maximum(top, sink)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        decay = tl.exp2(top - base)
        total = total * decay + tl.exp2(sink - base)
        acc = acc * decay[:, None]
        top = highest

    s = scores(q, k.to(q.dtype), scale, cap, CAPPED)
    s = tl.where(seen[None, :], s, float("-inf"))
    top, total, acc = accumulate(s, v.to(q.dtype), top, total, acc, True)  # pyright: ignore
    for begin in range(first + BLOCK_N, last, BLOCK_N):
        k, v, seen = load_tile(keys, values, slots, begin, last, low, wide, SLOT_STRIDE, BLOCK_N)  # pyright: ignore
        s = scores(q, k.to(q.dtype), scale, cap, CAPPED)
        s = tl.where(seen[None, :], s, float("-inf"))
        top, total, acc = accumulate(s, v.to(q.dtype), top, total, acc, False)  # pyright: ignore
    result, log = finish(top, total, acc)  # pyright: ignore
    result *= v_scale

    wanted = there[:, None] & wide
    index = item * HEADS + head
    if not TAIL:
        entry = index + split.to(tl.int64) * items * HEADS
        mask = wanted & (split < parts)
        tl.store(partial + entry[:, None] * D + d[None, :], result, mask=mask)
        tl.store(lse + entry, log, mask=there)
    elif parts <= 1:
        # One part, or no keys at all: its result is the result.
        if split == 0:
            place = out + index[:, None] * D + d[None, :]
            tl.store(place, result.to(out.dtype.element_ty), mask=wanted)
    elif split < parts:
        entry = index + split.to(tl.int64) * items * HEADS
        tl.store(partial + entry[:, None] * D + d[None, :], result, mask=wanted)
        tl.store(lse + entry, log, mask=there)
        # Every thread's stores come before the count, which says that they are there.
        tl.debug_barrier()
        counter = counters + item * KV_HEADS + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1:
            tl.store(counter, 0)
            merge_group(
                partial, lse, out, item, items, kv_head, parts,
                HEADS, GROUP, D, BLOCK_D, BLOCK_G, BLOCK_P, MERGED,
            )  # fmt: skip


def fused_decode(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMeta,
    heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    counters: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    splits: int | None = None,
    tile: tuple[int, int, int] | None = None,
    ahead: tuple[torch.Tensor, torch.Tensor] | None = None,
    ahead_bytes: int = 24 << 20,
    tail: bool = True,
    pdl: bool = False,
) -> torch.Tensor:
    """`rope_write`, then `decode`, of qkv [B, (Hq + 2 Hk) D]: attention's output [B, Hq, D].

    Item i of `meta` has its newest token at position kv_lens[i] - 1, whose K and V go to the slot
    that the table holds there; no two items may share that slot. counters [B * Hk or more] int32
    must hold zeros, and does so again afterwards; one stream at a time may use them. For up to 16
    query heads a KV head. `tile` is (keys, warps, stages). `ahead`: two weights that the
    next kernels read, of which up to `ahead_bytes` from their starts on are fetched into the cache
    meanwhile. Without `tail` the parts are merged by a kernel of their own. Raises ValueError for
    shapes that do not fit.
    """
    items = qkv.shape[0]
    group = heads // kv_heads
    require(
        qkv.is_contiguous() and qkv.shape[1] == (heads + 2 * kv_heads) * head_dim,
        f"qkv must be [B, {(heads + 2 * kv_heads) * head_dim}], contiguous: {tuple(qkv.shape)}",
    )
    require(heads % kv_heads == 0 and group <= LARGEST_GROUP, f"{heads} heads over {kv_heads}")
    require((q_norm is None) == (k_norm is None), "norms of q and k come together")
    require(cos_sin.dtype == torch.float32 and cos_sin.is_contiguous(), "cos_sin is float32")
    require(
        counters.numel() >= items * kv_heads and counters.dtype == torch.int32,
        f"counters must be int32, {items * kv_heads} or more",
    )
    stride = slot_stride(k_cache, v_cache, head_dim)
    if out is None:
        out = torch.empty(items, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if items == 0:
        return out
    wide = qkv.dtype == torch.float32 or head_dim > 128
    block_n, warps, stages = tile or (32 if wide else 64, 4, 3)
    # Very few programs: shorter parts, whose keys are all loaded before q is there.
    shortest = SHORTEST // 2 if items * kv_heads <= 4 else SHORTEST
    if splits is None:
        longest = min(meta.max_kv, window + block_n) if window else meta.max_kv
        programs = 3 * multiprocessors(qkv.device)
        splits = choose_splits(items * kv_heads, longest, programs, shortest)
    shape = (splits, items, heads) if splits > 1 else (1, 1, 1)
    partial = torch.empty(*shape, head_dim, dtype=torch.float32, device=qkv.device)
    lse = torch.empty(shape, dtype=torch.float32, device=qkv.device)
    extra, sizes = 0, [0, 0]
    if ahead is not None and dependent_launch(qkv.device, True):
        extra = ceil_div(multiprocessors(qkv.device), items * kv_heads)
        sizes[0] = min(ahead[0].nbytes, ahead_bytes) // FETCHED.value * FETCHED.value
        sizes[1] = min(ahead[1].nbytes, ahead_bytes - sizes[0]) // FETCHED.value * FETCHED.value
    first_ahead, then_ahead = ahead if extra and ahead else (qkv, qkv)
    start(
        fused_decode_kernel,
        (kv_heads, items, splits + extra),
        qkv, cos_sin, k_cache, v_cache, out, partial, lse, counters,
        meta.table, meta.rows, meta.kv_lens,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        qkv if sinks is None else sinks,
        first_ahead, then_ahead,
        eps, offset, scale * k_scale, softcap, 1.0 / k_scale, 1.0 / v_scale, v_scale,
        meta.table.stride(0), splits, *sizes,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        R=cos_sin.shape[1],
        SLOT_STRIDE=stride,
        BLOCK_D=power_of_two(head_dim),
        BLOCK_H=LARGEST_GROUP,
        BLOCK_G=power_of_two(group),
        BLOCK_N=block_n,
        BLOCK_P=power_of_two(splits),
        MERGED=max(1, min(power_of_two(splits), MERGED_AT_ONCE * 8 // power_of_two(group), 16)),
        WINDOW=window,
        LEAST=ceil_div(shortest, block_n),
        CAPPED=softcap > 0,
        SINKS=sinks is not None,
        NORM=q_norm is not None,
        AHEAD=extra > 0,
        TAIL=tail or splits == 1,
        device=qkv.device,
        pdl=pdl,
        warps=warps,
        stages=stages,
    )  # fmt: skip
    if splits > 1 and not tail:
        merge(partial, lse, out=out, pdl=pdl)
    return out
