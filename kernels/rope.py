"""Rotary embedding of q and k, fused with the write of K and V into their slots.

Reference: `reference.rope`. Layout of a row of qkv: Hq heads of q, Hk of k, Hk of v, each D wide.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import after_previous, ceil_div, power_of_two, require, start

KV_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)


@triton.jit
def rotated(
    heads,
    head_mask,
    norm,
    cos_sin_row,
    eps,
    offset,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NORM: tl.constexpr,
):
    """Rotate [HB, D] heads that start at pointers `heads` [HB]; float32.

    Neox style: dimension d < R / 2 pairs with d + R / 2; dimensions from R on pass through. With
    NORM the heads are RMS-normed first. Each value is loaded beside its partner, which the
    first-level cache answers.
    """
    HALF: tl.constexpr = R // 2
    d = tl.arange(0, BLOCK_D)
    partner = tl.where(d < HALF, d + HALF, tl.where(d < R, d - HALF, d))
    angle = tl.where(d < HALF, d, d - HALF)
    if HALF % 8 == 0:
        # The compiler does not see through `where` that eight neighbours stay neighbours.
        partner = tl.max_contiguous(tl.multiple_of(partner, 8), 8)
        angle = tl.max_contiguous(tl.multiple_of(angle, 8), 8)
    mask = head_mask[:, None] & (d < D)[None, :]
    value = tl.load(heads[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(heads[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(value * value, axis=1) / D + eps)[:, None]
        gain = tl.load(norm + d, mask=d < D, other=0.0).to(tl.float32) + offset
        partner_gain = tl.load(norm + partner, mask=d < D, other=0.0).to(tl.float32) + offset
        value = value * scale * gain[None, :]
        other = other * scale * partner_gain[None, :]
    cos = tl.load(cos_sin_row + angle, mask=d < R, other=1.0)
    sin = tl.load(cos_sin_row + HALF + angle, mask=d < R, other=0.0)
    sin = tl.where(d < HALF, -sin, sin)
    return value * cos[None, :] + other * sin[None, :]


@triton.jit
def rope_write_kernel(
    qkv,
    positions,
    slots,
    cos_sin,
    q_out,
    k_cache,
    v_cache,
    q_norm,
    k_norm,
    eps,
    offset,
    k_inverse,
    v_inverse,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    WHOLE: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token's heads of q by the block, then those of k and v: by a program each, or WHOLE, all
    by one."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    Q_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    KV_BLOCKS: tl.constexpr = (KV_HEADS + BLOCK_KV - 1) // BLOCK_KV
    row = qkv + token * ((HEADS + 2 * KV_HEADS) * D)
    d = tl.arange(0, BLOCK_D)
    wide = (d < D)[None, :]
    position = tl.load(positions + token).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    angles = cos_sin + position * R
    after_previous(PDL)
    for i in tl.static_range(Q_BLOCKS + KV_BLOCKS):
        if WHOLE or block == i:
            if i < Q_BLOCKS:
                head = i * BLOCK_H + tl.arange(0, BLOCK_H)
                there = head < HEADS
                q = rotated(row + head * D, there, q_norm, angles, eps, offset, D, R, BLOCK_D, NORM)
                q_place = q_out + (token * HEADS + head[:, None]) * D + d[None, :]
                tl.store(q_place, q.to(q_out.dtype.element_ty), mask=there[:, None] & wide)
            else:
                kv_head = (i - Q_BLOCKS) * BLOCK_KV + tl.arange(0, BLOCK_KV)
                held = (kv_head < KV_HEADS) & (slot >= 0)
                start = row + (HEADS + kv_head) * D
                k = rotated(start, held, k_norm, angles, eps, offset, D, R, BLOCK_D, NORM)
                source = start[:, None] + KV_HEADS * D + d[None, :]
                mask = held[:, None] & wide
                v = tl.load(source, mask=mask, other=0.0).to(tl.float32)
                place = slot * SLOT_STRIDE + kv_head[:, None] * D + d[None, :]
                tl.store(k_cache + place, (k * k_inverse).to(k_cache.dtype.element_ty), mask=mask)
                tl.store(v_cache + place, (v * v_inverse).to(v_cache.dtype.element_ty), mask=mask)


def slot_stride(k_cache: torch.Tensor, v_cache: torch.Tensor, head_dim: int) -> int:
    """Elements from one slot to the next; checks that both caches are laid out alike, a slot's
    heads together.

    Raises ValueError for a cache that is not [S, Hk, D] with contiguous slots.
    """
    stride = k_cache.stride(0)
    require(
        k_cache.dim() == 3
        and k_cache.shape == v_cache.shape
        and k_cache.dtype == v_cache.dtype
        and k_cache.dtype in KV_DTYPES
        and k_cache.shape[2] == head_dim
        and k_cache.stride()[1:] == (head_dim, 1)
        and v_cache.stride() == k_cache.stride(),
        f"caches must be [S, Hk, {head_dim}] alike: {k_cache.shape}, {v_cache.shape}",
    )
    return stride


def rope_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    invariant: bool = False,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Rotate q and k of qkv [T, (Hq + 2 Hk) D]; write K and V to their slots; return q [T, Hq, D].

    positions [T] int32, slots [T] int64 (a negative slot writes nothing), cos_sin [P, R] float32 (R
    rotary dimensions: cosines of R / 2 angles, then sines), caches [S, Hk, D] of one dtype among
    `KV_DTYPES`, norms [D] for both or none. The caches hold K / k_scale and V / v_scale.
    `invariant`: the same program for any number of tokens. Raises ValueError for shapes that do not
    fit.
    """
    tokens = qkv.shape[0]
    require(
        qkv.is_contiguous() and qkv.shape[1] == (heads + 2 * kv_heads) * head_dim,
        f"qkv must be [T, {(heads + 2 * kv_heads) * head_dim}], contiguous: {tuple(qkv.shape)}",
    )
    require((q_norm is None) == (k_norm is None), "norms of q and k come together")
    rotary = cos_sin.shape[1]
    require(rotary <= head_dim and rotary % 2 == 0, f"{rotary} rotary of {head_dim} dimensions")
    require(cos_sin.dtype == torch.float32 and cos_sin.is_contiguous(), "cos_sin is float32")
    stride = slot_stride(k_cache, v_cache, head_dim)
    if out is None:
        out = torch.empty(tokens, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return out
    # Few tokens: a program for two heads, for latency. Many: one a token, for fewer programs.
    # The norm of a head may round differently in the one and the other.
    whole = tokens > 64 or invariant
    block = min(power_of_two(heads), 16) if whole else 2
    kv_block = min(power_of_two(kv_heads), 16) if whole else 2
    blocks = 1 if whole else ceil_div(heads, block) + ceil_div(kv_heads, kv_block)
    start(
        rope_write_kernel,
        (tokens, blocks),
        qkv,
        positions,
        slots,
        cos_sin,
        out,
        k_cache,
        v_cache,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        eps,
        offset,
        1.0 / k_scale,
        1.0 / v_scale,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        R=rotary,
        SLOT_STRIDE=stride,
        BLOCK_D=power_of_two(head_dim),
        BLOCK_H=block,
        BLOCK_KV=kv_block,
        WHOLE=whole,
        NORM=q_norm is not None,
        device=qkv.device,
        pdl=pdl,
        warps=4 if whole else 1,
    )
    return out


def cost(
    tokens: int, heads: int, kv_heads: int, head_dim: int, size: int, kv_size: int
) -> tuple[int, int]:
    """(bytes moved, operations) of one call."""
    read = tokens * (heads + 2 * kv_heads) * head_dim * size
    written = tokens * head_dim * (heads * size + 2 * kv_heads * kv_size)
    return read + written, tokens * (heads + kv_heads) * head_dim * 3
