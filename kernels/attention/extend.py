"""Paged attention for prefill and extension: packed ragged queries over KV whose newest tokens are
theirs.

Reference: `reference.attention`. The rows of a tile are queries times the heads of one KV head, so
that they share each load of K and V and a short chunk fills a tile. Tiles of keys that every row
sees are not masked; the heaviest tiles (the last queries of an item) start first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import after_previous, ceil_div, multiprocessors, power_of_two, require, start
from ..rope import slot_stride
from .merge import merge
from .meta import AttentionMeta
from .splits import choose_splits
from .tile import accumulate, finish, inner_mask, scores

SHORTEST = 256
"""Tokens under which a part of an item's keys is not worth a program of its own."""
WHOLE = 512
"""Tokens up to which keys are not cut at all: reading them takes less than merging parts does."""


@triton.jit
def item_of(q_start, items, tile, BLOCK_Q: tl.constexpr):
    """(item, tile within it, first token of all) of a tile; its queries may end before it does.

    Item i owns the tiles from (q_start[i] - q_start[0]) // BLOCK_Q + i on: that is at least as many
    as it needs, and the host knows a bound of their sum without knowing the lengths.
    """
    origin = tl.load(q_start)
    count = tile * 0  # so that it is a tensor, which a loop can carry
    for base in range(0, items, 128):
        i = base + tl.arange(0, 128)
        begin = (tl.load(q_start + i, mask=i < items, other=0) - origin) // BLOCK_Q + i
        count += tl.sum(((begin <= tile) & (i < items)).to(tl.int32), axis=0)
    item = tl.maximum(count - 1, 0)
    begin = (tl.load(q_start + item) - origin) // BLOCK_Q + item
    return item, tile - begin, origin


@triton.jit
def sweep(
    query,
    keys,
    values,
    slots,
    positions,
    first,
    last,
    scale,
    cap,
    top,
    total,
    acc,
    start,
    places,
    ends,
    depths,
    SLOT_STRIDE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    NODES: tl.constexpr,
):
    """Attend to the keys of [first, last); without MASKED every row sees every one of them. With
    NODES those from `start` on are nodes of a tree, whose place in the text (as `places` are of the
    rows) is not where they lie."""
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    wide = inner_mask(d, D, BLOCK_D)
    for begin in range(first, last, BLOCK_N):
        key = begin + n
        if MASKED:
            slot = tl.load(slots + key, mask=key < last, other=0).to(tl.int64)
        else:
            slot = tl.load(slots + key).to(tl.int64)
        offset = slot[:, None] * SLOT_STRIDE
        k = tl.load(keys + offset, mask=wide, other=0.0).to(query.dtype)
        s = scores(query, k, scale, cap, CAPPED)
        if MASKED:
            seen = (key[None, :] <= positions[:, None]) & (key < last)[None, :]
            if NODES:
                node = (key >= start) & (key < last)
                end = tl.load(ends + (key - start), mask=node, other=2147483647)
                seen &= (positions - start)[:, None] < end[None, :]
                if WINDOW > 0:
                    depth = tl.load(depths + (key - start), mask=node, other=0)
                    place = tl.where(node, start + depth, key)
                    seen &= place[None, :] > places[:, None] - WINDOW
            elif WINDOW > 0:
                seen &= key[None, :] > positions[:, None] - WINDOW
            s = tl.where(seen, s, float("-inf"))
            v = tl.load(values + offset, mask=wide & (key < last)[:, None], other=0.0)
        else:
            v = tl.load(values + offset, mask=wide, other=0.0)
        top, total, acc = accumulate(s, v.to(query.dtype), top, total, acc, MASKED)
    return top, total, acc


@triton.jit(
    do_not_specialize=["items", "tokens"],
    do_not_specialize_on_alignment=["rows", "q_start", "kv_lens", "starts", "offsets"],
)
def extend_kernel(
    q,
    k_cache,
    v_cache,
    out,
    lse,
    table,
    rows,
    q_start,
    kv_lens,
    sinks,
    starts,
    offsets,
    ends,
    depths,
    scale,
    cap,
    v_scale,
    table_stride,
    items,
    tokens,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    UNMASKED: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    NODES: tl.constexpr,
    LSE: tl.constexpr,
    LEAST: tl.constexpr,
    PDL: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    split = tl.program_id(2)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    item, local, origin = item_of(q_start, items, tile, BLOCK_Q)  # pyright: ignore
    begin = tl.load(q_start + item)
    count = tl.load(q_start + item + 1) - begin
    length = tl.load(kv_lens + item)
    after_previous(PDL)
    if (local >= 0) & (local * BLOCK_Q < count):
        slots = table + tl.load(rows + item).to(tl.int64) * table_stride
        r = tl.arange(0, BLOCK_M)
        d = tl.arange(0, BLOCK_D)
        wide = inner_mask(d, D, BLOCK_D)
        index = local * BLOCK_Q + r // GROUP
        there = (r < BLOCK_Q * GROUP) & (index < count)
        head = kv_head * GROUP + r % GROUP
        earliest = length - count + local * BLOCK_Q
        position = length - count + index
        row = (begin - origin + index).to(tl.int64) * HEADS + head
        query = tl.load(q + row[:, None] * D + d[None, :], mask=there[:, None] & wide, other=0.0)
        start = 0
        place = position
        straight = earliest
        if NODES:
            # A node stands no further on in the text than where it lies, nor before the first.
            start = tl.load(starts + item)
            ends += tl.load(offsets + item)
            depths += tl.load(offsets + item)
            straight = tl.minimum(earliest, start)
            if WINDOW > 0:
                node = there & (position >= start)
                depth = tl.load(depths + (position - start), mask=node, other=0)
                place = tl.where(node, start + depth, position)
        # The keys any row of the tile sees, [low, high), from a multiple of BLOCK_N on.
        high = tl.maximum(tl.minimum(earliest + BLOCK_Q, length), 0)
        low = 0
        if WINDOW > 0:
            low = tl.maximum(straight - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        tiles = (high - low + BLOCK_N - 1) // BLOCK_N
        splits = tl.num_programs(2)
        each = tl.maximum((tiles + splits - 1) // splits, LEAST) * BLOCK_N
        first = low + split * each
        last = tl.minimum(first + each, high)

        top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        if SINKS:  # noqa: SIM102
            if split == 0:
                top = tl.load(sinks + head, mask=there, other=0.0).to(tl.float32)
                top *= 1.4426950408889634
                total += tl.where(position >= 0, 1.0, 0.0)
        keys = k_cache + kv_head * D + d[None, :]
        values = v_cache + kv_head * D + d[None, :]
        middle = first
        if UNMASKED:
            # Up to here every row sees whole tiles.
            seen = straight if NODES else earliest + 1
            middle = tl.minimum(tl.maximum(seen // BLOCK_N * BLOCK_N, first), last)
            top, total, acc = sweep(
                query, keys, values, slots, position, first, middle, scale, cap, top, total, acc,
                start, place, ends, depths,
                SLOT_STRIDE, D, BLOCK_D, BLOCK_N, WINDOW, CAPPED, False, NODES,
            )  # fmt: skip
        top, total, acc = sweep(
            query, keys, values, slots, position, middle, last, scale, cap, top, total, acc,
            start, place, ends, depths,
            SLOT_STRIDE, D, BLOCK_D, BLOCK_N, WINDOW, CAPPED, True, NODES,
        )  # fmt: skip
        result, log = finish(top, total, acc)
        result *= v_scale
        row += split.to(tl.int64) * tokens * HEADS
        written = there & ((last > first) | (splits == 1))
        place = out + row[:, None] * D + d[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=written[:, None] & wide)
        if LSE:
            tl.store(lse + row, log, mask=there)


def tile_shape(rows: int, head_dim: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """(rows, keys, warps, stages) of a tile, for items of up to `rows` queries times grouped
    heads."""
    if dtype == torch.float32:
        return min(max(power_of_two(rows), 16), 32), 16 if head_dim > 128 else 32, 4, 2
    if head_dim > 128:
        block = min(max(power_of_two(rows), 16), 64)
        return block, 32, 4, 2
    block = min(max(power_of_two(rows), 16), 128)
    return block, 64, 8 if block == 128 else 4, 3


def extend(
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
    first_item: int = 0,
    splits: int | None = None,
    tile: tuple[int, int, int, int] | None = None,
    invariant: bool = False,
    pdl: bool = False,
) -> torch.Tensor:
    """Causal attention of packed queries q [T, Hq, D] over the items of `meta` from `first_item`
    on: [T, Hq, D]. Of items that are trees, nodes see their ancestors alone.

    K and V of the queries' own tokens must be in the caches already. Rows of q that belong to no
    such item keep what `out` holds there. Options and errors are those of `decode`; `lse` is [T,
    Hq] float32.
    """
    tokens, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    require(q.is_contiguous(), "q must be contiguous")
    require(heads % kv_heads == 0, f"{heads} heads do not share {kv_heads} KV heads evenly")
    stride = slot_stride(k_cache, v_cache, dim)
    if out is None:
        out = torch.empty_like(q)
    items = len(meta.rows) - first_item
    if tokens == 0 or items == 0:
        return out
    group = heads // kv_heads
    shape = tile or tile_shape(64 if invariant else max(meta.max_q, 1) * group, dim, q.dtype)
    block_m, block_n, warps, stages = shape
    block_m = max(block_m, power_of_two(group))
    tiles = tokens // (block_m // group) + items
    if splits is None:
        programs = multiprocessors(q.device) * (8 // warps)
        longest = min(meta.max_kv, window + meta.max_q) if window else meta.max_kv
        # A grid that fills the device needs no parts: partial results cost bandwidth.
        whole = longest <= WHOLE or tiles * kv_heads >= programs
        splits = 1 if whole else choose_splits(tiles * kv_heads, longest, programs, SHORTEST)
    trees = meta.ancestry
    nodes = (q,) * 4  # not read
    if trees is not None:
        nodes = trees.starts[first_item:], trees.offsets[first_item:], trees.ends, trees.depths
    partial, logs = out, lse
    if splits > 1:
        partial = torch.empty(splits, tokens, heads, dim, dtype=torch.float32, device=q.device)
        # Rows of padding are merged too: no program writes them, so they start without keys.
        logs = torch.full((splits, tokens, heads), -torch.inf, dtype=torch.float32, device=q.device)
    start(
        extend_kernel,
        (kv_heads, tiles, splits),
        q,
        k_cache,
        v_cache,
        partial,
        partial if logs is None else logs,
        meta.table,
        meta.rows[first_item:],
        meta.q_start[first_item:],
        meta.kv_lens[first_item:],
        q if sinks is None else sinks,
        *nodes,
        scale * k_scale,
        softcap,
        v_scale,
        meta.table.stride(0),
        items,
        tokens,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=dim,
        SLOT_STRIDE=stride,
        BLOCK_D=power_of_two(dim),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        WINDOW=window,
        # Two loops round differently (one may fuse a product with a sum), and where one ends
        # depends on the tile: invariant results need a single loop.
        UNMASKED=window == 0 and not invariant,
        CAPPED=softcap > 0,
        SINKS=sinks is not None,
        NODES=trees is not None,
        LSE=logs is not None,
        LEAST=ceil_div(SHORTEST, block_n) if splits > 1 else 1,
        device=q.device,
        pdl=pdl,
        warps=warps,
        stages=stages,
    )
    if logs is not None and splits > 1:
        merge(partial, logs, out=out, lse_out=lse, pdl=pdl)
    return out


def cost(
    q_len: int, kv_len: int, heads: int, kv_heads: int, head_dim: int, size: int
) -> tuple[int, int]:
    """(bytes moved, operations) for one item: q_len new tokens, the last of kv_len, causal."""
    pairs = q_len * (kv_len - q_len) + q_len * (q_len + 1) // 2
    moved = (2 * q_len * heads + 2 * kv_len * kv_heads) * head_dim * size
    return moved, 4 * pairs * heads * head_dim
