"""Token embeddings."""

from __future__ import annotations

import torch


def embed(ids: torch.Tensor, weight: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Rows of ``weight`` [V, H] at ``ids`` [T], times ``scale``: [T, H]."""
    rows = weight.index_select(0, ids)
    return rows if scale == 1.0 else rows.mul_(scale)
