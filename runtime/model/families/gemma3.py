"""Gemma 3: norms on both sides of each part, and five windowed layers to one that sees all."""

from __future__ import annotations

from typing import ClassVar

import torch

from ....kernels.attention.meta import AttentionMeta
from ..ends import Ends
from ..layers.attention import Attention
from ..layers.mlp import GatedMlp
from ..layers.weights import Weights
from .decoder import Decoder

_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


class Gemma3Decoder(Decoder):
    """What attention and MLP give is normed before it joins the residual."""

    architectures: ClassVar[tuple[str, ...]] = ("gemma3",)

    def build(self, weights: Weights) -> None:
        config, hidden = self.config, self.config.hidden_size
        self.attentions: list[Attention] = []
        self.mlps: list[GatedMlp] = []
        self.norms: list[list[torch.Tensor]] = []
        for i in range(config.num_layers):
            self.attentions.append(Attention(config, i, self.ops, weights, self.rope_of(i)))
            self.mlps.append(GatedMlp(config, i, self.ops, weights))
            self.norms.append(
                [weights.take(f"model.layers.{i}.{n}.weight", hidden) for n in _NORMS]
            )

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        meta: AttentionMeta,
        kv: torch.Tensor,
        ends: Ends | None = None,
    ) -> torch.Tensor:
        ops, eps, offset = self.ops, self.config.rms_eps, self.config.norm_offset
        residual = self.embed(ids)
        x = ops.rms_norm(residual, self.norms[0][0], eps, offset)
        following = [*(norms[0] for norms in self.norms[1:]), self.norm]
        for i, next_norm in enumerate(following):
            _, after_attention, before_mlp, after_mlp = self.norms[i]
            attention = self.attentions[i]
            q = attention.rotate(attention.qkv.apply(x), positions, slots, kv[i])
            if ends is not None and i + 1 == len(following):
                if not len(ends.at):
                    return residual[:0]
                q, residual = (x.index_select(0, ends.at) for x in (q, residual))
                meta = ends.meta
            x = attention.out.apply(attention.attend(q, meta, kv[i]))
            x = ops.rms_norm(x, after_attention, eps, offset)
            x = ops.add_rms_norm(x, residual, before_mlp, eps, offset)
            x = self.mlps[i].forward(x)
            x = ops.rms_norm(x, after_mlp, eps, offset)
            x = ops.add_rms_norm(x, residual, next_norm, eps, offset)
        return x
