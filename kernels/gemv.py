"""Products of a few rows with a whole weight matrix: the kernels behind `small_batch`.

Both read each weight once, in order, and are bound by that. A program owns some outputs and all of
K, so nothing is summed across programs. What surrounds the product in a decoder is done on the way:
the RMS norm of x before it (its weight scales x, its root scales the sum afterwards, so x is read
once); the bias, and the gate, the residual or the rotation of q and k after it. The first tile of
weights is asked for before the kernel waits for the one that makes x.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activation import activate
from .launch import after_previous


@triton.jit
def epilogue(y, up, bias, out, column, place, mask, N, BIAS: tl.constexpr, ACT: tl.constexpr,
             ADD: tl.constexpr):  # fmt: skip
    """Bias, gate or residual, then the store of outputs `column` at `place`."""
    if BIAS:
        y += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    if ACT != "":
        if BIAS:
            up += tl.load(bias + N + column, mask=mask, other=0.0).to(tl.float32)
        y = activate(y, ACT) * up
    if ADD:
        y += tl.load(out + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def rotary_epilogue(
    y, z, bias, out, positions, slots, cos_sin, k_cache, v_cache, k_inverse, v_inverse,
    pair, m, mask, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    SLOT_STRIDE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Of outputs y and z, D / 2 apart in a head of q, k or v of token m: bias, rotation, and the
    store of q to `out`, of k and v to the token's slot."""
    HALF: tl.constexpr = D // 2
    head = pair // HALF
    d = pair % HALF
    if BIAS:
        y += tl.load(bias + head * D + d, mask=mask, other=0.0).to(tl.float32)
        z += tl.load(bias + head * D + HALF + d, mask=mask, other=0.0).to(tl.float32)
    turned = mask & (head < HEADS + KV_HEADS)
    angle = cos_sin + tl.load(positions + m, mask=mask, other=0).to(tl.int64) * D + d
    cos = tl.load(angle, mask=turned, other=1.0)
    sin = tl.load(angle + HALF, mask=turned, other=0.0)
    low = y * cos - z * sin
    high = z * cos + y * sin
    place = out + (m * HEADS + head) * D + d
    asks = mask & (head < HEADS)
    tl.store(place, low.to(out.dtype.element_ty), mask=asks)
    tl.store(place + HALF, high.to(out.dtype.element_ty), mask=asks)
    slot = tl.load(slots + m, mask=mask, other=-1)
    held = mask & (slot >= 0)
    start = slot * SLOT_STRIDE + d
    key = k_cache + start + (head - HEADS) * D
    keys = held & (head >= HEADS) & (head < HEADS + KV_HEADS)
    tl.store(key, (low * k_inverse).to(k_cache.dtype.element_ty), mask=keys)
    tl.store(key + HALF, (high * k_inverse).to(k_cache.dtype.element_ty), mask=keys)
    value = v_cache + start + (head - HEADS - KV_HEADS) * D
    values = held & (head >= HEADS + KV_HEADS)
    tl.store(value, (low * v_inverse).to(v_cache.dtype.element_ty), mask=values)
    tl.store(value + HALF, (high * v_inverse).to(v_cache.dtype.element_ty), mask=values)


@triton.jit
def paired_lines(weight, n, N, K: tl.constexpr, D: tl.constexpr, ROTATED: tl.constexpr):
    """Where weight's rows for outputs n begin, and how far on the rows are that go with them: up's
    with gate's, or the other half of a head's."""
    if ROTATED:
        HALF: tl.constexpr = D // 2
        row = (n // HALF) * D + n % HALF
        return weight + row.to(tl.int64) * K, tl.cast(HALF * K, tl.int64)
    return weight + n.to(tl.int64) * K, tl.cast(N, tl.int64) * K


@triton.jit
def one_row_step(
    w, u, x, norm, k, offset, acc, up, squares,
    K: tl.constexpr, EVEN: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Take tile(s) w, u [BLOCK_N, BLOCK_K] at columns k into the sums."""
    inside = (k < K) | EVEN
    value = tl.load(x + k, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        squares += value * value
        value *= tl.load(norm + k, mask=inside, other=0.0).to(tl.float32) + offset
    acc += w.to(tl.float32) * value[None, :]
    if GATED:
        up += u.to(tl.float32) * value[None, :]
    return acc, up, squares


@triton.jit
def one_row_tile(line, second, k, there, K: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr):
    """Weights at columns k of each row that starts at `line`; with GATED those at `second` too."""
    mask = there[:, None] & ((k < K) | EVEN)[None, :]
    w = tl.load(line + k[None, :], mask=mask, other=0.0)
    u = tl.load(second + k[None, :], mask=mask, other=0.0) if GATED else w
    return w, u


@triton.jit
def one_row_kernel(
    x,
    weight,
    bias,
    norm,
    out,
    eps,
    offset,
    positions,
    slots,
    cos_sin,
    k_cache,
    v_cache,
    k_inverse,
    v_inverse,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    BEFORE: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ACT: tl.constexpr,
    ADD: tl.constexpr,
    ROTATED: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row of x [K]: float32 products in the ordinary cores, each thread summing its own
    columns. The first BEFORE tiles of weight, 1 to 4, are loaded before x is waited for."""
    GATED: tl.constexpr = (ACT != "") or ROTATED
    EVEN: tl.constexpr = K % BLOCK_K == 0
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = n < N
    k = tl.arange(0, BLOCK_K)
    line, further = paired_lines(weight, n, N, K, D, ROTATED)  # pyright: ignore
    line = line[:, None]
    second = line + further
    w, u = one_row_tile(line, second, k, there, K, EVEN, GATED)  # pyright: ignore
    if BEFORE > 1:
        w1, u1 = one_row_tile(line, second, BLOCK_K + k, there, K, EVEN, GATED)  # pyright: ignore
    if BEFORE > 2:
        w2, u2 = one_row_tile(line, second, 2 * BLOCK_K + k, there, K, EVEN, GATED)  # pyright: ignore
    if BEFORE > 3:
        w3, u3 = one_row_tile(line, second, 3 * BLOCK_K + k, there, K, EVEN, GATED)  # pyright: ignore
    after_previous(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    squares = tl.zeros([BLOCK_K], dtype=tl.float32)
    acc, up, squares = one_row_step(
        w, u, x, norm, k, offset, acc, up, squares, K, EVEN, NORM, GATED
    )
    if BEFORE > 1:
        acc, up, squares = one_row_step(
            w1, u1, x, norm, BLOCK_K + k, offset, acc, up, squares, K, EVEN, NORM, GATED
        )
    if BEFORE > 2:
        acc, up, squares = one_row_step(
            w2, u2, x, norm, 2 * BLOCK_K + k, offset, acc, up, squares, K, EVEN, NORM, GATED
        )
    if BEFORE > 3:
        acc, up, squares = one_row_step(
            w3, u3, x, norm, 3 * BLOCK_K + k, offset, acc, up, squares, K, EVEN, NORM, GATED
        )
    for first in tl.range(BEFORE * BLOCK_K, K, BLOCK_K, num_stages=STAGES):
        column = first + k
        w, u = one_row_tile(line, second, column, there, K, EVEN, GATED)  # pyright: ignore
        acc, up, squares = one_row_step(
            w, u, x, norm, column, offset, acc, up, squares, K, EVEN, NORM, GATED
        )
    y = tl.sum(acc, axis=1)
    z = tl.sum(up, axis=1)
    if NORM:
        root = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        y *= root
        z *= root
    if ROTATED:
        rotary_epilogue(
            y, z, bias, out, positions, slots, cos_sin, k_cache, v_cache, k_inverse, v_inverse,
            n, 0 * n, there, HEADS, KV_HEADS, D, SLOT_STRIDE, BIAS,
        )  # fmt: skip
    else:
        epilogue(y, z, bias, out, n, n, there, N, BIAS, ACT, ADD)


@triton.jit
def few_rows_step(
    w, u, x, norm, m, k, there, offset, acc, up, squares,
    K: tl.constexpr, EVEN: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Take tile(s) w, u [SLICES, BLOCK_N, BLOCK_K] at columns k [SLICES, BLOCK_K] into the sums."""
    inside = (k < K) | EVEN
    mask = there[None, None, :] & inside[:, :, None]
    value = tl.load(x + m[None, None, :] * K + k[:, :, None], mask=mask, other=0.0)
    if NORM:
        wide = value.to(tl.float32)
        squares += wide * wide
        gain = tl.load(norm + k, mask=inside, other=0.0).to(tl.float32) + offset
        value = (wide * gain[:, :, None]).to(w.dtype)
    acc = tl.dot(w, value, acc)
    if GATED:
        up = tl.dot(u, value, up)
    return acc, up, squares


@triton.jit(do_not_specialize=["rows"])
def few_rows_kernel(
    x,
    weight,
    bias,
    norm,
    out,
    eps,
    offset,
    positions,
    slots,
    cos_sin,
    k_cache,
    v_cache,
    k_inverse,
    v_inverse,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ACT: tl.constexpr,
    ADD: tl.constexpr,
    ROTATED: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Up to BLOCK_M rows of x [rows, K]: weight times x transposed in the tensor cores.

    Each warp takes a slice of K of the program's rows of weight (a batch of products); slices are
    summed at the end.
    """
    GATED: tl.constexpr = (ACT != "") or ROTATED
    EVEN: tl.constexpr = K % (SLICES * BLOCK_K) == 0
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    there = m < rows
    k = tl.arange(0, SLICES)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    line, further = paired_lines(weight, n, N, K, D, ROTATED)  # pyright: ignore
    line = line[None, :, None]
    second = line + further
    lines = (n < N)[None, :, None]
    mask = lines & ((k < K) | EVEN)[:, None, :]
    w = tl.load(line + k[:, None, :], mask=mask, other=0.0)
    u = tl.load(second + k[:, None, :], mask=mask, other=0.0) if GATED else w
    after_previous(PDL)
    acc = tl.zeros([SLICES, BLOCK_N, BLOCK_M], dtype=tl.float32)
    up = tl.zeros([SLICES, BLOCK_N, BLOCK_M], dtype=tl.float32)
    squares = tl.zeros([SLICES, BLOCK_K, BLOCK_M], dtype=tl.float32)
    acc, up, squares = few_rows_step(
        w, u, x, norm, m, k, there, offset, acc, up, squares, K, EVEN, NORM, GATED
    )
    for first in range(SLICES * BLOCK_K, K, SLICES * BLOCK_K):
        column = first + k
        mask = lines & ((column < K) | EVEN)[:, None, :]
        w = tl.load(line + column[:, None, :], mask=mask, other=0.0)
        u = tl.load(second + column[:, None, :], mask=mask, other=0.0) if GATED else w
        acc, up, squares = few_rows_step(
            w, u, x, norm, m, column, there, offset, acc, up, squares, K, EVEN, NORM, GATED
        )
    y = tl.sum(acc, axis=0)
    z = tl.sum(up, axis=0)
    if NORM:
        root = tl.rsqrt(tl.sum(tl.sum(squares, axis=0), axis=0) / K + eps)
        y *= root[None, :]
        z *= root[None, :]
    place = m[None, :] * N + n[:, None]
    mask = (n < N)[:, None] & there[None, :]
    column = n[:, None] + 0 * m[None, :]
    if ROTATED:
        rotary_epilogue(
            y, z, bias, out, positions, slots, cos_sin, k_cache, v_cache, k_inverse, v_inverse,
            column, m[None, :] + 0 * column, mask, HEADS, KV_HEADS, D, SLOT_STRIDE, BIAS,
        )  # fmt: skip
    else:
        epilogue(y, z, bias, out, column, place, mask, N, BIAS, ACT, ADD)
