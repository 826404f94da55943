"""What all decoder families share: embedding, rope tables, the layers' loop is theirs, the head."""

from __future__ import annotations

from typing import ClassVar

import torch

from ....kernels.attention.meta import AttentionMeta
from ....kernels.ops import Ops
from ..config import ModelConfig
from ..ends import Ends
from ..layers.linear import Linear, make_linear
from ..layers.rope import rope_table
from ..layers.weights import Weights


class Decoder:
    """A decoder-only transformer whose state (KV) belongs to the caller.

    Subclasses build their layers from ``weights`` and run them in `layers_forward`. ``positions``
    bounds what positions can be asked for.
    """

    architectures: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: ModelConfig, ops: Ops, weights: Weights, *, positions: int) -> None:
        self.config = config
        self.ops = ops
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embedding = weights.rows("model.embed_tokens.weight", vocab, hidden)
        device = self.embedding.device
        self.cos_sin = rope_table(config.rope, config.head_dim, positions, device)
        self.local_cos_sin = self.cos_sin
        if config.local_rope is not None:
            self.local_cos_sin = rope_table(config.local_rope, config.head_dim, positions, device)
        self.build(weights)
        self.norm = weights.take("model.norm.weight", hidden)
        self.head: Linear = make_linear(ops, self._head_weight(weights))
        weights.finish()

    def _head_weight(self, weights: Weights) -> torch.Tensor:
        """[V, H]. Files of tied models may hold it too: it is the same then, and dropped."""
        vocab, hidden = self.config.vocab_size, self.config.hidden_size
        own = None
        if "lm_head.weight" in weights:
            own = weights.rows("lm_head.weight", vocab, hidden)
        if self.config.tie_embeddings or own is None:
            own = self.embedding
        return own[:vocab]

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """[T] int32 to the residual's first state [T, H], float32 where the device keeps it so."""
        x = self.ops.embed(ids, self.embedding, self.config.embed_scale)
        return x.float() if self.ops.WIDE_RESIDUAL else x

    def rope_of(self, layer: int) -> torch.Tensor:
        """The table by which a layer rotates."""
        return self.local_cos_sin if self.config.window(layer) else self.cos_sin

    def build(self, weights: Weights) -> None:
        """Make the layers, taking their tensors."""
        raise NotImplementedError

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        meta: AttentionMeta,
        kv: torch.Tensor,
        ends: Ends | None = None,
    ) -> torch.Tensor:
        """Hidden states after the last norm, [T, H], or of ``ends`` alone, [S, H].

        ``ids`` [T] int32, ``positions`` [T] int32, ``slots`` [T] int64: where each token's K and V
        are written. ``kv`` [layers, 2, slots, Hk, D].
        """
        raise NotImplementedError

    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, H] to [S, V], uncapped: their order is that of the logits."""
        return self.head.scores(hidden)

    def finish_logits(self, raw: torch.Tensor) -> torch.Tensor:
        """`raw_logits` to logits, float32."""
        out = raw.float()
        cap = self.config.final_softcap
        return self.ops.softcap_(out, cap) if cap else out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, H] to [S, V] float32."""
        return self.finish_logits(self.raw_logits(hidden))
