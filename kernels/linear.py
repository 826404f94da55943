"""Linear layers, and those with a norm, a gate or a residual around them, by the fastest way there
is.

Reference: `reference.linear`. Up to 256 rows a measured kernel of `small_batch` or `mid_batch` may
take them; else the vendor's library does, with the norm and the gate as kernels of their own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .activation import gate
from .mid_batch import Tiles, mid_gate_up, mid_linear, mid_linear_add
from .norm import rms_norm
from .operands import Norm, Rotation
from .small_batch import Plan, small_linear
from .small_batch import gate_up as small_gate_up
from .small_batch import linear_add as small_linear_add
from .small_batch import norm_gate_up as small_norm_gate_up
from .small_batch import norm_linear as small_norm_linear
from .small_batch import norm_rotate as small_norm_rotate
from .tuning import ROW_BUCKETS, Product, table_for


def plan_for(
    x: torch.Tensor, weight: torch.Tensor, *, gated: bool = False, normed: bool = False
) -> Plan | Tiles | None:
    """The plan of a product of few rows; None where the library takes it."""
    rows = x.shape[0]
    if rows > ROW_BUCKETS[-1] or rows == 0 or not (x.is_contiguous() and weight.is_contiguous()):
        return None
    if x.dtype != weight.dtype or x.device.type == "cpu":
        return None
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    return table_for(x.device).plan(Product(rows, n, weight.shape[1], gated, normed), x.dtype)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, pdl: bool = False
) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N]: [T, N]."""
    plan = plan_for(x, weight)
    if plan is None:
        return F.linear(x, weight, bias)
    if isinstance(plan, Tiles):
        return mid_linear(x, weight, bias, tiles=plan, pdl=pdl)
    return small_linear(x, weight, bias, plan=plan, pdl=pdl)


def wide(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Room for the product of x [T, K] and weight [N, K] in float32."""
    return torch.empty(len(x), len(weight), dtype=torch.float32, device=x.device)


def head(x: torch.Tensor, weight: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """`linear` whose result is float32 whatever x and weight are: [T, N]."""
    plan = plan_for(x, weight)
    if isinstance(plan, Tiles):
        return mid_linear(x, weight, tiles=plan, out=wide(x, weight), pdl=pdl)
    if plan is not None:
        return small_linear(x, weight, plan=plan, out=wide(x, weight), pdl=pdl)
    if x.dtype == torch.float32 or x.device.type == "cpu":
        return F.linear(x, weight).float()
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    offset: float = 0.0,
    normed: torch.Tensor | None = None,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """`linear` of the RMS norm of x [T, K], which is `normed` where it is there; x is not
    changed."""
    plan = plan_for(x, weight, normed=True)
    if isinstance(plan, Plan) and normed is None:
        return small_norm_linear(
            x, norm_weight, eps, weight, bias, offset=offset, plan=plan, pdl=pdl
        )  # fmt: skip
    if normed is None:
        normed = rms_norm(x, norm_weight, eps, offset, pdl=pdl)
    if isinstance(plan, Tiles):
        return mid_linear(normed, weight, bias, tiles=plan, pdl=pdl)
    if plan is not None:
        return small_linear(normed, weight, bias, plan=plan, pdl=pdl)
    return F.linear(normed, weight, bias)


def norm_rotate(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    offset: float,
    rotation: Rotation,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    pdl: bool = False,
) -> torch.Tensor | None:
    """`rope.rope_write` of `norm_linear` as one kernel, where there is one: q [T, Hq, D], or None
    with nothing done."""
    plan = plan_for(x, weight, normed=True)
    if not isinstance(plan, Plan) or rotation.cos_sin.shape[1] != rotation.head_dim:
        return None
    return small_norm_rotate(
        x, norm_weight, eps, weight, bias, rotation, offset=offset, k_scale=k_scale,
        v_scale=v_scale, plan=plan, pdl=pdl,
    )  # fmt: skip


def linear_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    *,
    pdl: bool = False,
) -> torch.Tensor | None:
    """residual [T, N] += `linear` of x, in place. Returns `norm` of the residual where it comes for
    nothing, else None."""
    plan = plan_for(x, weight)
    if isinstance(plan, Tiles):
        return mid_linear_add(x, weight, residual, bias, tiles=plan, norm=norm, pdl=pdl)
    if plan is not None:
        small_linear_add(x, weight, residual, bias, plan=plan, pdl=pdl)
        return None
    if bias is not None:
        residual += bias
    residual.addmm_(x, weight.t())
    return None


def norm_gate_up(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    act: str,
    offset: float = 0.0,
    normed: torch.Tensor | None = None,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """act(gate) * up of the RMS norm of x [T, K] (or of `normed`), weight [2 F, K] holding gate's
    rows, then up's: [T, F]."""
    plan = plan_for(x, weight, gated=True)
    if isinstance(plan, Plan) and normed is None:
        return small_norm_gate_up(
            x, norm_weight, eps, weight, act, offset=offset, plan=plan, pdl=pdl
        )  # fmt: skip
    if normed is None:
        normed = rms_norm(x, norm_weight, eps, offset, pdl=pdl)
    if isinstance(plan, Tiles):
        return mid_gate_up(normed, weight, act, tiles=plan, pdl=pdl)
    if plan is not None:
        return small_gate_up(normed, weight, act, plan=plan, pdl=pdl)
    return gate(F.linear(normed, weight), act, pdl=pdl)
