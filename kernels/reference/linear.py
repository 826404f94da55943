"""Matrix products with weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x`` [T, K] times ``weight`` [N, K] transposed, plus ``bias`` [N]: [T, N]."""
    return F.linear(x, weight, bias)
