"""Llama and its kin: Mistral, Qwen 2 (biases on q, k, v), Qwen 3 (normed q and k)."""

from __future__ import annotations

from typing import ClassVar

import torch

from ....kernels.attention.meta import AttentionMeta
from ..layers.attention import Attention
from ..layers.mlp import GatedMlp
from ..layers.weights import Weights
from .decoder import Decoder


class LlamaDecoder(Decoder):
    """Two norms a layer, each before its part; every norm also adds what came before it."""

    architectures: ClassVar[tuple[str, ...]] = ("llama", "mistral", "qwen2", "qwen3")

    def build(self, weights: Weights) -> None:
        config, hidden = self.config, self.config.hidden_size
        self.attentions: list[Attention] = []
        self.mlps: list[GatedMlp] = []
        self.attention_norms: list[torch.Tensor] = []
        self.mlp_norms: list[torch.Tensor] = []
        for i in range(config.num_layers):
            name = f"model.layers.{i}"
            self.attentions.append(Attention(config, i, self.ops, weights, self.rope_of(i)))
            self.mlps.append(GatedMlp(config, i, self.ops, weights))
            self.attention_norms.append(weights.take(f"{name}.input_layernorm.weight", hidden))
            self.mlp_norms.append(weights.take(f"{name}.post_attention_layernorm.weight", hidden))

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        meta: AttentionMeta,
        kv: torch.Tensor,
    ) -> torch.Tensor:
        ops, eps, offset = self.ops, self.config.rms_eps, self.config.norm_offset
        residual = ops.embed(ids, self.embedding, self.config.embed_scale)
        x = ops.rms_norm(residual, self.attention_norms[0], eps, offset)
        # The norm after a layer is the one before the next; the last is the decoder's own.
        following = [*self.attention_norms[1:], self.norm]
        for i, next_norm in enumerate(following):
            x = self.attentions[i].forward(x, positions, slots, meta, kv[i])
            x = ops.add_rms_norm(x, residual, self.mlp_norms[i], eps, offset)
            x = self.mlps[i].forward(x)
            x = ops.add_rms_norm(x, residual, next_norm, eps, offset)
        return x
