"""The operations a decoder is made of, and which implementation a device gets."""

from __future__ import annotations

from typing import Literal, Protocol, cast

import torch

from .attention.meta import AttentionMeta
from .operands import Norm, Rotation

Activation = Literal["silu", "gelu_tanh"]


class Ops(Protocol):
    """Every tensor lies on one device and is contiguous unless said otherwise.

    T tokens, H hidden, D head dim, Hq query heads, Hk key heads, S sampling rows, V vocabulary.
    Sums are in float32; results have the dtype of the input, those of norms that of the weight.
    Nothing is read back to the host.
    """

    WIDE_RESIDUAL: bool
    """Whether the residual of 16-bit models is kept in float32: half the rounding error of a
    forward, for more bytes moved."""

    def embed(self, ids: torch.Tensor, weight: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Rows of ``weight`` [V, H] at ``ids`` [T] int32, times ``scale``: [T, H]."""
        ...

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
    ) -> torch.Tensor:
        """``x / rms(x) * (weight + offset)`` over the last axis of [T, H]."""
        ...

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        offset: float = 0.0,
    ) -> torch.Tensor:
        """``residual += x`` in place, then the norm of it."""
        ...

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``x`` [T, K] times ``weight`` [N, K] transposed, plus ``bias`` [N]: [T, N]."""
        ...

    def head(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`linear` of the last layer: [S, V] in the finest dtype that the device gives for
        nothing."""
        ...

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
        """`linear` of `rms_norm` of x [T, K], which is ``normed`` where it is there: [T, N]."""
        ...

    def linear_add(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        residual: torch.Tensor,
        bias: torch.Tensor | None = None,
        norm: Norm | None = None,
    ) -> torch.Tensor | None:
        """``residual`` [T, N] += `linear` of x, in place. Returns ``norm`` of the residual where it
        comes for nothing."""
        ...

    def norm_gate_up(
        self,
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        act: Activation,
        offset: float = 0.0,
        normed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`gate` of `linear` of `rms_norm` of x, which is ``normed`` where it is there; ``weight``
        [2F, K]: [T, F]."""
        ...

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
        """Norm the heads of q and k where weights [D] are given, rotate them (halves, the first R
        of D dims), write K and V to ``slots`` [T] int64 of the caches [slots, Hk, D].

        ``qkv`` is [T, (Hq + 2 Hk) * D], ``positions`` [T] int32, ``cos_sin`` [P, R] float32 with
        R/2 cosines, then R/2 sines. Returns q [T, Hq, D].
        """
        ...

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
        """`rope_write` of `norm_linear` of x, where one kernel does both; else None, with nothing
        done."""
        ...

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
        """Causal attention of q [T, Hq, D] over the paged KV that ``meta`` describes: [T, Hq, D].

        ``window`` w > 0: a query at position p sees (p - w, p]. ``softcap`` c > 0: scores become
        ``c * tanh(s / c)``. ``sinks`` [Hq]: a further score a head whose value is zero.
        """
        ...

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
        """`attention`, and the natural log of each softmax's denominator [T, Hq] float32."""
        ...

    def gate(self, x: torch.Tensor, act: Activation) -> torch.Tensor:
        """``act(x[:, :F]) * x[:, F:]`` of [T, 2F]: [T, F]."""
        ...

    def softcap_(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        """``cap * tanh(x / cap)`` in place."""
        ...

    def greedy(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest logit's id of each row (the first of equals), [S] int32, and [S] bool:
        whether the row holds a NaN or nothing above -inf (its id is then 0)."""
        ...

    def take_greedy(
        self, logits: torch.Tensor, rows: torch.Tensor, last_tokens: torch.Tensor
    ) -> torch.Tensor:
        """`greedy` as one tensor [2, S] int32, ids and 1 where bad; and ``last_tokens`` [R] int32
        at ``rows`` [S] int32 takes the ids."""
        ...

    def enter_decode(
        self,
        rows: torch.Tensor,
        kv_lens: torch.Tensor,
        slots: torch.Tensor,
        last_tokens: torch.Tensor,
        table: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What a step of one token for each of ``rows`` [B] starts from, all int32: ids =
        ``last_tokens[rows]``, positions = ``kv_lens - 1``, ``slots`` as int64; and
        ``table[rows, positions] = slots``."""
        ...

    def penalize_(
        self,
        logits: torch.Tensor,
        index: torch.Tensor,
        counts: torch.Tensor,
        repetition: torch.Tensor,
        frequency: torch.Tensor,
        presence: torch.Tensor,
    ) -> torch.Tensor:
        """Apply penalties in place to ``logits`` [S, V] float32.

        ``counts`` [P, V] int32 holds how often a token was sampled, plus `PROMPT_BIT` when it is in
        the prompt. Row i uses ``counts[index[i]]``; index -1: no penalties. The others are [S]
        float32. Repetition: logits above 0 are divided, others multiplied, for tokens of prompt or
        output; then ``frequency * count + presence * (count > 0)`` is subtracted, of the output.
        """
        ...

    def add_at_(
        self, logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """``logits[rows[j], ids[j]] += values[j]`` for [n] int64, int64, float32; sums beyond
        float32 saturate at its largest value."""
        ...

    def mask_(
        self,
        logits: torch.Tensor,
        mask: torch.Tensor,
        at: torch.Tensor | None = None,
        of: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Set logits to -inf where the bit of ``mask`` [K, ceil(V / 32)] int32 is 0: bit v % 32,
        from the lowest, of word v // 32. Row ``of[i]`` of the mask is for logits row ``at[i]``
        ([M] int32 both), so that rows alike are given once. Without ``of`` it is row i; without
        ``at`` there is one for every row. Other rows stay as they are."""
        ...

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
        """Draw one id a row from ``softmax(logits / temperature)``: ids [S] int32, bad [S] bool.

        Kept are tokens of probability no less than: the ``top_k``-th largest (0 or less: all); the
        largest t for which tokens of probability ≥ t hold ``top_p`` of what is left; ``min_p``
        times the largest. Equal ones stay together. The draw inverts the cumulative sum over kept
        tokens in order of ids at ``uniform(seeds [S] int64, steps [S])``. Rows of temperature under
        1e-5 are greedy. ``filtered=False`` promises that no row uses top_k, top_p or min_p.
        """
        ...

    def uniform(self, seeds: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """A number in [0, 1) with 24 random bits, float32 [S], a hash of seed and step alone."""
        ...

    def token_logprobs(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Natural log-prob of ``ids`` [S] under each row of ``logits`` [S, V]: [S] float32."""
        ...

    def top_logprobs(self, logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The k most likely ids of each row, [S, k] int32, and their log-probs, [S, k] float32."""
        ...


def ops_for(device: torch.device | str) -> Ops:
    """The implementation for a device: torch on the CPU, Triton on CUDA.

    Raises ValueError for another device and RuntimeError when triton is missing.
    """
    kind = torch.device(device).type
    if kind == "cpu":
        from .reference import ops as reference

        return cast("Ops", reference)
    if kind == "cuda":
        try:
            import triton  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]
        except ImportError as error:
            raise RuntimeError(
                f"device {device} needs triton, which cannot be imported: {error}"
            ) from error
        from . import device_ops  # pyright: ignore[reportAttributeAccessIssue]

        return cast("Ops", device_ops.OPS)
    raise ValueError(f"no kernels for device {str(device)!r}: known are cpu and cuda")
