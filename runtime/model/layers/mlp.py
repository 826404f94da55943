"""The gated feed-forward layer."""

from __future__ import annotations

import torch

from ....kernels.operands import Norm
from ....kernels.ops import Ops
from ..config import Activation, ModelConfig
from .linear import make_linear
from .weights import Weights


class GatedMlp:
    """``down(act(gate(x)) * up(x))`` with gate and up as one product."""

    def __init__(self, config: ModelConfig, layer: int, ops: Ops, weights: Weights) -> None:
        name = f"model.layers.{layer}.mlp"
        hidden, size = config.hidden_size, config.ffn_size
        names = [f"{name}.gate_proj", f"{name}.up_proj"]
        bias = down_bias = None
        if config.mlp_bias:
            bias = weights.joined_bias([f"{n}.bias" for n in names], [size, size])
            down_bias = weights.take(f"{name}.down_proj.bias", hidden)
        joined = weights.joined([f"{n}.weight" for n in names], [size, size], hidden)
        self.gate_up = make_linear(ops, joined, bias)
        down = weights.take(f"{name}.down_proj.weight", hidden, size)
        self.down = make_linear(ops, down, down_bias)
        self.ops = ops
        self.act: Activation = config.act

    def add_to(
        self,
        residual: torch.Tensor,
        norm: Norm,
        normed: torch.Tensor | None = None,
        following: Norm | None = None,
    ) -> torch.Tensor | None:
        """``residual += mlp(norm(residual))``, in place; ``normed`` is that norm where it is there.
        Returns ``following`` of the residual if it comes for nothing."""
        inner = self.gate_up.gated_of_norm(residual, norm, self.act, normed)
        return self.down.add_to(residual, inner, following)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H], normed already, to [T, H]."""
        return self.down.apply(self.ops.gate(self.gate_up.apply(x), self.act))
