"""Self-attention over paged KV: projections, positions, the cache."""

from __future__ import annotations

import torch

from ....kernels.attention.meta import AttentionMeta
from ....kernels.operands import Norm, Rotation
from ....kernels.ops import Ops
from ..config import ModelConfig
from .linear import make_linear
from .weights import Weights


class Attention:
    """One layer's attention. ``cos_sin`` [P, R] is shared by the layers that rotate alike."""

    def __init__(
        self, config: ModelConfig, layer: int, ops: Ops, weights: Weights, cos_sin: torch.Tensor
    ) -> None:
        name = f"model.layers.{layer}.self_attn"
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        names = [f"{name}.{part}_proj" for part in "qkv"]
        heights = [heads * dim, kv_heads * dim, kv_heads * dim]
        hidden = config.hidden_size
        bias = out_bias = None
        if config.attention_bias:
            bias = weights.joined_bias([f"{n}.bias" for n in names], heights)
        if config.output_bias:
            out_bias = weights.take(f"{name}.o_proj.bias", hidden)
        joined = weights.joined([f"{n}.weight" for n in names], heights, hidden)
        self.qkv = make_linear(ops, joined, bias)
        out = weights.take(f"{name}.o_proj.weight", hidden, heads * dim)
        self.out = make_linear(ops, out, out_bias)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = weights.take(f"{name}.q_norm.weight", dim)
            self.k_norm = weights.take(f"{name}.k_norm.weight", dim)
        self.ops = ops
        self.config = config
        self.cos_sin = cos_sin
        self.window = config.window(layer)
        self.scale = config.attn_scale or dim**-0.5

    def rotate(
        self, qkv: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, kv: torch.Tensor
    ) -> torch.Tensor:
        """Projected q, k and v [T, (Hq + 2 Hk) D] to rotated q [T, Hq, D]. K and V of the T tokens
        are written to ``slots`` [T] of ``kv`` [2, slots, Hk, D], this layer's."""
        config = self.config
        return self.ops.rope_write(
            qkv,
            positions,
            slots,
            self.cos_sin,
            kv[0],
            kv[1],
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            self.q_norm,
            self.k_norm,
            config.rms_eps,
            config.norm_offset,
        )

    def rotated_of_norm(
        self,
        x: torch.Tensor,
        norm: Norm,
        normed: torch.Tensor | None,
        positions: torch.Tensor,
        slots: torch.Tensor,
        kv: torch.Tensor,
    ) -> torch.Tensor:
        """`rotate` of the projections of the norm of x, which is ``normed`` where it is there."""
        config = self.config
        q = None
        if normed is None and self.q_norm is None:
            shape = (config.num_heads, config.num_kv_heads, config.head_dim)
            rotation = Rotation(positions, slots, self.cos_sin, kv[0], kv[1], *shape)
            q = self.qkv.rotated_of_norm(x, norm, rotation)
        if q is None:
            q = self.rotate(self.qkv.of_norm(x, norm, normed), positions, slots, kv)
        return q

    def attend(self, q: torch.Tensor, meta: AttentionMeta, kv: torch.Tensor) -> torch.Tensor:
        """Rotated q [T, Hq, D] to [T, Hq D], before the last projection. All of the step's K and V
        are in ``kv`` before any of it is read."""
        cap = self.config.attn_softcap
        return self.ops.attention(q, kv[0], kv[1], meta, self.scale, self.window, cap).flatten(1)
