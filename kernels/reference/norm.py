"""RMS norm, alone and after a residual addition."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> torch.Tensor:
    """``x / rms(x) * (weight + offset)`` over the last axis, computed in float32; of weight's
    dtype."""
    if weight.dtype == x.dtype and not offset:
        return F.rms_norm(x, weight.shape, weight, eps)  # sums in float32 for half types
    y = F.rms_norm(x.float(), weight.shape, weight.float() + offset, eps)
    return y.to(weight.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> torch.Tensor:
    """``residual += x`` in place, then `rms_norm` of it."""
    return rms_norm(residual.add_(x), weight, eps, offset)
