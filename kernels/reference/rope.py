"""Rotary positions, with the optional norms of q and k before and the write of K and V after."""

from __future__ import annotations

import torch

from ..operands import Rotation
from .norm import rms_norm


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first R dims of ``x`` [T, heads, D] by halves; ``cos``, ``sin`` [T, R/2]."""
    half, dim = cos.shape[-1], x.shape[-1]
    if 2 * half < dim:
        turned = rotate(x[..., : 2 * half], cos, sin)
        return torch.cat((turned, x[..., 2 * half :]), dim=-1)
    # In few operations: x * cos + swapped halves of x * (-sin, sin).
    y = x.float().unflatten(-1, (2, half))
    signed = torch.stack((-sin, sin), dim=1).unsqueeze(1)
    turned = torch.addcmul(y * cos[:, None, None], y.flip(2), signed)
    return turned.view(x.shape).to(x.dtype)


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
) -> torch.Tensor:
    """See `Ops.rope_write`. Returns q [T, Hq, D]; K and V are written to their slots."""
    x = qkv.view(qkv.shape[0], heads + 2 * kv_heads, head_dim)
    rows = cos_sin.index_select(0, positions)
    cos, sin = rows.chunk(2, dim=-1)
    if q_norm is None and k_norm is None:
        turned = rotate(x[:, : heads + kv_heads], cos, sin)
        q, k = turned[:, :heads], turned[:, heads:]
    else:
        q, k = x[:, :heads], x[:, heads : heads + kv_heads]
        q = rotate(q if q_norm is None else rms_norm(q, q_norm, eps, offset), cos, sin)
        k = rotate(k if k_norm is None else rms_norm(k, k_norm, eps, offset), cos, sin)
    k_cache.index_copy_(0, slots, k.to(k_cache.dtype))
    v_cache.index_copy_(0, slots, x[:, heads + kv_heads :].to(v_cache.dtype))
    return q


def norm_rotate(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    offset: float,
    rotation: Rotation,
) -> torch.Tensor | None:
    """On the CPU there is nothing to be won by doing both at once."""
    return None
