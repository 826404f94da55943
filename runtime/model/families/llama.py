"""Llama and its kin: Mistral, Qwen 2 (biases on q, k, v), Qwen 3 (normed q and k)."""

from __future__ import annotations

from typing import ClassVar

import torch

from ....kernels.attention.meta import AttentionMeta
from ....kernels.operands import Norm
from ..ends import Ends
from ..layers.attention import Attention
from ..layers.mlp import GatedMlp
from ..layers.weights import Weights
from .decoder import Decoder


class LlamaDecoder(Decoder):
    """Two norms a layer, each before its part; what a part gives is added to the residual."""

    architectures: ClassVar[tuple[str, ...]] = ("llama", "mistral", "qwen2", "qwen3")

    def build(self, weights: Weights) -> None:
        config, hidden = self.config, self.config.hidden_size
        self.attentions: list[Attention] = []
        self.mlps: list[GatedMlp] = []
        self.attention_norms: list[Norm] = []
        self.mlp_norms: list[Norm] = []
        for i in range(config.num_layers):
            name = f"model.layers.{i}"
            self.attentions.append(Attention(config, i, self.ops, weights, self.rope_of(i)))
            self.mlps.append(GatedMlp(config, i, self.ops, weights))
            for norms, norm in (
                (self.attention_norms, "input_layernorm"),
                (self.mlp_norms, "post_attention_layernorm"),
            ):
                weight = weights.take(f"{name}.{norm}.weight", hidden)
                norms.append(Norm(weight, config.rms_eps, config.norm_offset))

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        meta: AttentionMeta,
        kv: torch.Tensor,
        ends: Ends | None = None,
    ) -> torch.Tensor:
        config = self.config
        last = Norm(self.norm, config.rms_eps, config.norm_offset)
        residual = self.embed(ids)
        normed = None
        for i, attention in enumerate(self.attentions):
            q = attention.rotated_of_norm(
                residual, self.attention_norms[i], normed, positions, slots, kv[i]
            )
            if ends is not None and i + 1 == config.num_layers:
                if not len(ends.at):
                    return residual[:0]
                q, residual = (x.index_select(0, ends.at) for x in (q, residual))
                meta = ends.meta
            y = attention.attend(q, meta, kv[i])
            normed = attention.out.add_to(residual, y, self.mlp_norms[i])
            following = self.attention_norms[i + 1] if i + 1 < config.num_layers else last
            normed = self.mlps[i].add_to(residual, self.mlp_norms[i], normed, following)
        if normed is not None:
            return normed
        return self.ops.rms_norm(residual, last.weight, last.eps, last.offset)
