"""The operations of a decoder on a CUDA device: `Ops` by Triton kernels."""

from __future__ import annotations

import torch

from . import activation, embed, linear, norm, rope, sampling, step
from . import logits as logits_
from . import rows as rows_
from .attention.dispatch import attend
from .attention.meta import AttentionMeta
from .invariant import invariant_linear
from .operands import Norm, Rotation
from .reference import sampling as reference


class DeviceOps:
    """Nothing here reads a value back to the host, so all of it can be captured into a CUDA graph.

    `pdl`: let each kernel be launched while the one before it still runs. `invariant`: attention
    gives a token the same bits whatever the batch, the chunks or the cache, by one order of
    summing. `k_scale`, `v_scale`: a float8 cache holds K and V divided by these.
    """

    WIDE_RESIDUAL = False

    def __init__(
        self,
        *,
        pdl: bool = True,
        invariant: bool = False,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        self.pdl = pdl
        self.invariant = invariant
        self.k_scale = k_scale
        self.v_scale = v_scale

    def embed(self, ids: torch.Tensor, weight: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """See `Ops.embed`. Ids outside the table give zeros."""
        return embed.embed(ids, weight, scale, pdl=self.pdl)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
    ) -> torch.Tensor:
        """See `Ops.rms_norm`."""
        return norm.rms_norm(x, weight, eps, offset, pdl=self.pdl)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        offset: float = 0.0,
    ) -> torch.Tensor:
        """See `Ops.add_rms_norm`."""
        return norm.add_rms_norm(x, residual, weight, eps, offset, pdl=self.pdl)

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Ops.linear`."""
        if self.invariant:
            return invariant_linear(x, weight, bias, pdl=self.pdl)
        return linear.linear(x, weight, bias, pdl=self.pdl)

    def head(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`linear` of the last layer, in float32: rounding to 16 bits would cost as much as all
        that was rounded before."""
        if self.invariant:
            return invariant_linear(x, weight, out=linear.wide(x, weight), pdl=self.pdl)
        return linear.head(x, weight, pdl=self.pdl)

    def norm_linear(
        self,
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        offset: float = 0.0,
        normed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`linear` of `rms_norm` of x [T, K]: one kernel for few rows. x is not changed."""
        if self.invariant:
            return self.linear(self.rms_norm(x, norm_weight, eps, offset), weight, bias)
        return linear.norm_linear(x, norm_weight, eps, weight, bias, offset, normed, pdl=self.pdl)

    def linear_add(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        residual: torch.Tensor,
        bias: torch.Tensor | None = None,
        norm: Norm | None = None,
    ) -> torch.Tensor | None:
        """See `Ops.linear_add`."""
        if not self.invariant:
            return linear.linear_add(x, weight, residual, bias, norm, pdl=self.pdl)
        residual.add_(self.linear(x, weight, bias))
        return None

    def norm_gate_up(
        self,
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        act: str,
        offset: float = 0.0,
        normed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`gate` of `linear` of `rms_norm` of x, weight [2 F, K]: [T, F]; one kernel for few
        rows."""
        if self.invariant:
            return self.gate(self.norm_linear(x, norm_weight, eps, weight, None, offset), act)
        return linear.norm_gate_up(
            x, norm_weight, eps, weight, act, offset, normed, pdl=self.pdl
        )  # fmt: skip

    def rope_write(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        cos_sin: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        heads: int,
        kv_heads: int,
        head_dim: int,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        eps: float = 1e-6,
        offset: float = 0.0,
    ) -> torch.Tensor:
        """See `Ops.rope_write`. Negative slots write nothing."""
        return rope.rope_write(
            qkv, positions, slots, cos_sin, k_cache, v_cache, heads, kv_heads, head_dim,
            q_norm, k_norm, eps, offset, k_scale=self.k_scale, v_scale=self.v_scale,
            invariant=self.invariant, pdl=self.pdl,
        )  # fmt: skip

    def norm_rotate(
        self,
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        offset: float,
        rotation: Rotation,
    ) -> torch.Tensor | None:
        """See `Ops.norm_rotate`."""
        if self.invariant:
            return None
        return linear.norm_rotate(
            x, norm_weight, eps, weight, bias, offset, rotation, k_scale=self.k_scale,
            v_scale=self.v_scale, pdl=self.pdl,
        )  # fmt: skip

    def attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMeta,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Ops.attention`. Items without keys give zeros."""
        return attend(
            q, k_cache, v_cache, meta, scale, window, softcap, sinks, k_scale=self.k_scale,
            v_scale=self.v_scale, invariant=self.invariant, pdl=self.pdl,
        )  # fmt: skip

    def attention_lse(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMeta,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Ops.attention_lse`. Items without keys have -inf."""
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        out = attend(
            q, k_cache, v_cache, meta, scale, window, softcap, sinks, k_scale=self.k_scale,
            v_scale=self.v_scale, lse=lse, invariant=self.invariant, pdl=self.pdl,
        )  # fmt: skip
        return out, lse

    def gate(self, x: torch.Tensor, act: str) -> torch.Tensor:
        """See `Ops.gate`."""
        return activation.gate(x, act, pdl=self.pdl)

    def softcap_(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        """See `Ops.softcap_`."""
        return x.div_(cap).tanh_().mul_(cap)

    def greedy(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Ops.greedy`."""
        return rows_.greedy(logits, pdl=self.pdl)

    def take_greedy(
        self, logits: torch.Tensor, rows: torch.Tensor, last_tokens: torch.Tensor
    ) -> torch.Tensor:
        """See `Ops.take_greedy`."""
        return rows_.take_greedy(logits, rows, last_tokens, pdl=self.pdl)

    def enter_decode(
        self,
        rows: torch.Tensor,
        kv_lens: torch.Tensor,
        slots: torch.Tensor,
        last_tokens: torch.Tensor,
        table: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Ops.enter_decode`."""
        return step.enter_decode(rows, kv_lens, slots, last_tokens, table, pdl=self.pdl)

    def penalize_(
        self,
        logits: torch.Tensor,
        index: torch.Tensor,
        counts: torch.Tensor,
        repetition: torch.Tensor,
        frequency: torch.Tensor,
        presence: torch.Tensor,
    ) -> torch.Tensor:
        """See `Ops.penalize_`."""
        return logits_.penalize_(
            logits, index, counts, repetition, frequency, presence,
            prompt_bit=reference.PROMPT_BIT, pdl=self.pdl,
        )  # fmt: skip

    def mask_(
        self,
        logits: torch.Tensor,
        mask: torch.Tensor,
        at: torch.Tensor | None = None,
        of: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Ops.mask_`."""
        return logits_.mask_(logits, mask, at, of, pdl=self.pdl)

    def sample(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        seeds: torch.Tensor,
        steps: torch.Tensor,
        *,
        filtered: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Ops.sample`."""
        return sampling.sample(
            logits, temperature, top_k, top_p, min_p, seeds, steps, filtered=filtered, pdl=self.pdl
        )

    def token_logprobs(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """See `Ops.token_logprobs`."""
        return rows_.token_logprobs(logits, ids, pdl=self.pdl)

    def top_logprobs(self, logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Ops.top_logprobs`."""
        return rows_.top_logprobs(logits, k, pdl=self.pdl)

    # Few elements each, and torch's own kernels do not wait for the host here.
    add_at_ = staticmethod(reference.add_at_)
    uniform = staticmethod(reference.uniform)


OPS = DeviceOps()
