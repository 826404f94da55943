"""Linear layers, and those with a norm, a gate or a residual around them, by the fastest way there
is.

Reference: `reference.linear`. Up to 16 rows a tuned kernel of `small_batch` may take them; else the
vendor's library does, with the norm and the gate as kernels of their own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .activation import gate
from .norm import rms_norm
from .small_batch import MOST_ROWS, Plan, small_linear
from .small_batch import linear_add as small_linear_add
from .small_batch import norm_gate_up as small_norm_gate_up
from .small_batch import norm_linear as small_norm_linear
from .tuning import Product, table_for


def plan_for(
    x: torch.Tensor, weight: torch.Tensor, *, gated: bool = False, normed: bool = False
) -> Plan | None:
    """The plan of a small product; None where the library takes it."""
    rows = x.shape[0]
    if rows > MOST_ROWS or rows == 0 or not (x.is_contiguous() and weight.is_contiguous()):
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
    return small_linear(x, weight, bias, plan=plan, pdl=pdl)


def norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    offset: float = 0.0,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """`linear` of the RMS norm of x [T, K]; x is not changed."""
    plan = plan_for(x, weight, normed=True)
    if plan is None:
        return F.linear(rms_norm(x, norm_weight, eps, offset, pdl=pdl), weight, bias)
    return small_norm_linear(
        x, norm_weight, eps, weight, bias, offset=offset, plan=plan, pdl=pdl
    )  # fmt: skip


def linear_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """residual [T, N] += `linear` of x, in place; returns residual."""
    plan = plan_for(x, weight)
    if plan is not None:
        return small_linear_add(x, weight, residual, bias, plan=plan, pdl=pdl)
    if bias is not None:
        residual += bias
    return residual.addmm_(x, weight.t())


def norm_gate_up(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    act: str,
    offset: float = 0.0,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """act(gate) * up of the RMS norm of x [T, K], weight [2 F, K] holding gate's rows, then up's:
    [T, F]."""
    plan = plan_for(x, weight, gated=True)
    if plan is None:
        both = F.linear(rms_norm(x, norm_weight, eps, offset, pdl=pdl), weight)
        return gate(both, act, pdl=pdl)
    return small_norm_gate_up(
        x, norm_weight, eps, weight, act, offset=offset, plan=plan, pdl=pdl
    )  # fmt: skip
