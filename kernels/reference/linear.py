"""Matrix products with weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..operands import Norm
from .activation import gate
from .norm import rms_norm


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x`` [T, K] times ``weight`` [N, K] transposed, plus ``bias`` [N]: [T, N]."""
    return F.linear(x, weight, bias)


def head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`linear` of the last layer."""
    return F.linear(x, weight)


def norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    offset: float = 0.0,
    normed: torch.Tensor | None = None,
) -> torch.Tensor:
    """`linear` of the RMS norm of x [T, K], or of ``normed``: [T, N]."""
    if normed is None:
        normed = rms_norm(x, norm_weight, eps, offset)
    return linear(normed, weight, bias)


def linear_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
) -> torch.Tensor | None:
    """``residual`` [T, N] += `linear` of x, in place; its norm is left to who needs it."""
    residual.add_(linear(x, weight, bias))


def norm_gate_up(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    act: str,
    offset: float = 0.0,
    normed: torch.Tensor | None = None,
) -> torch.Tensor:
    """`gate` of `norm_linear`, ``weight`` [2F, K]: [T, F]."""
    return gate(norm_linear(x, norm_weight, eps, weight, None, offset, normed), act)
