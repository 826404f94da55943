"""Matrix products with weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .activation import gate
from .norm import rms_norm


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x`` [T, K] times ``weight`` [N, K] transposed, plus ``bias`` [N]: [T, N]."""
    return F.linear(x, weight, bias)


def norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    offset: float = 0.0,
) -> torch.Tensor:
    """`linear` of the RMS norm of x [T, K]: [T, N]."""
    return linear(rms_norm(x, norm_weight, eps, offset), weight, bias)


def linear_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``residual`` [T, N] += `linear` of x, in place; returns it."""
    return residual.add_(linear(x, weight, bias))


def norm_gate_up(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    act: str,
    offset: float = 0.0,
) -> torch.Tensor:
    """`gate` of `norm_linear`, ``weight`` [2F, K]: [T, F]."""
    return gate(norm_linear(x, norm_weight, eps, weight, None, offset), act)
