"""The kernels of `tree`: pieces of segments and tails, and the merge of what they leave."""

from __future__ import annotations

import triton
import triton.language as tl

from ..launch import after_previous
from .tile import accumulate, finish, inner_mask, scores


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
def pieces_kernel(
    q,
    k_cache,
    v_cache,
    partial,
    logs,
    table,
    kv_lens,
    count,
    pieces,
    readers,
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
    BLOCK_N: tl.constexpr,
    FIELDS: tl.constexpr,
    CAPPED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A block of rows of a piece, for one KV head. Of a segment the rows are all readers' heads; of
    a tail they are one item's, and which keys are meant is known here only, as it grows."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    BLOCKS: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    kv_head = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    index = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    wide = inner_mask(d, D, BLOCK_D)
    entry = pieces + index * FIELDS
    tail = tl.load(entry + 7) > 0
    # A segment has an entry for each of its blocks.
    works = (index < tl.load(count)) & (tail | (block == 0))
    slots = table + tl.load(entry, mask=works, other=0).to(tl.int64) * table_stride
    first = tl.load(entry + 1)
    last = tl.load(entry + 2)
    line = tl.load(entry + 3)
    r = tl.where(tail, block * BLOCK_M, line) + tl.arange(0, BLOCK_M)
    there = works & (r < tl.load(entry + 4))
    who = tl.load(entry + 5)
    read = readers + (who + r // GROUP) * 2
    lent = there & (tail == 0)
    item = tl.where(tail, who, tl.load(read, mask=lent, other=0)).to(tl.int64)
    part = tl.load(read + 1, mask=lent, other=0).to(tl.int64) + tl.load(entry + 6)
    # A tail begins at `first`, and this is piece `line` of `last`.
    length = tl.load(kv_lens + who, mask=works & tail, other=0)
    tiles = (tl.maximum(length - first, 0) + BLOCK_N - 1) // BLOCK_N
    each = (tiles + last - 1) // tl.maximum(last, 1) * BLOCK_N
    begin = first + line * each
    last = tl.where(tail, tl.minimum(begin + each, length), last)
    first = tl.where(tail, begin, first)
    head = kv_head * GROUP + r % GROUP
    # Programs without work need not wait, as long as some do.
    if works | (index == 0):
        after_previous(PDL)
    if works:
        query = tl.load(
            q + (item * HEADS + head)[:, None] * D + d[None, :],
            mask=there[:, None] & wide,
            other=0.0,
        )
        result, log = keys_of(
            query, slots, k_cache + kv_head * D + d[None, :], v_cache + kv_head * D + d[None, :],
            first, last, scale, cap, wide, SLOT_STRIDE, BLOCK_M, BLOCK_N, BLOCK_D, CAPPED,
        )  # fmt: skip
        place = part * HEADS + head
        tl.store(
            partial + place[:, None] * D + d[None, :],
            result * v_scale,
            mask=there[:, None] & wide & (last > first),
        )
        tl.store(logs + place, log, mask=there)


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
        value = tl.load(
            partial + place[:, None] * D + d[None, :],
            mask=(part < last)[:, None] & (d < D)[None, :],
            other=0.0,
        )
        # A part without keys is not written: only its log-sum-exp is.
        value = tl.where((log > float("-inf"))[:, None], value, 0.0)
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
