"""Gated activations and the tanh cap."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def gate(x: torch.Tensor, act: str) -> torch.Tensor:
    """``act(x[:, :F]) * x[:, F:]`` of [T, 2F]: [T, F]. ``act`` is silu or gelu_tanh."""
    a, b = x.chunk(2, dim=-1)
    if act == "silu":
        return F.silu(a).mul_(b)
    if act == "gelu_tanh":
        return F.gelu(a, approximate="tanh").mul_(b)
    raise ValueError(f"unknown activation {act!r}: known are silu and gelu_tanh")


def softcap_(x: torch.Tensor, cap: float) -> torch.Tensor:
    """``cap * tanh(x / cap)`` in place."""
    return x.div_(cap).tanh_().mul_(cap)
