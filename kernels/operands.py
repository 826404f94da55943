"""What operations take that is more than a tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm that stands before a linear layer: its weight [K], and what is added to that."""

    weight: torch.Tensor
    eps: float
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Masks:
    """What `Ops.mask_` needs beside logits: see there."""

    rows: torch.Tensor
    at: torch.Tensor | None = None
    of: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Rotation:
    """What `Ops.rope_write` needs beside q, k and v: see there."""

    positions: torch.Tensor
    slots: torch.Tensor
    cos_sin: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    heads: int
    kv_heads: int
    head_dim: int
