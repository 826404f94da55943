"""Steps of which only items' last tokens are looked at: past the last layer's K and V, nothing else
of them is needed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ...kernels.attention.meta import AttentionMeta
from ..scheduler.batch import IntArray, StepBatch


@dataclass(slots=True)
class Ends:
    """Which tokens of a step have their hidden states looked at, each the last of its item."""

    at: torch.Tensor
    """[S] of the step's tokens"""
    meta: AttentionMeta
    """Of them, a query each."""


def only_ends(batch: StepBatch) -> bool:
    """Whether that is so of a batch, and worth a thought: not where prompts are scored, nor where
    all tokens are ends."""
    scored = batch.prompt_logprobs or batch.tries
    return not scored and len(batch.samples) < batch.num_tokens


def ends_of(batch: StepBatch) -> list[IntArray]:
    """For `Ends`: the tokens, and of their items rows, lengths and where queries begin."""
    some = batch.samples
    at = np.cumsum(batch.q_lens)[some] - 1
    starts = np.arange(len(some) + 1)
    fields = (at, batch.rows[some], batch.kv_lens[some], starts)
    return [field.astype(np.int32) for field in fields]


def make_ends(batch: StepBatch, table: torch.Tensor, fields: list[torch.Tensor]) -> Ends:
    """`Ends` of a batch whose `ends_of` are ``fields``."""
    at, rows, kv_lens, starts = fields
    lengths = batch.kv_lens[batch.samples].tolist()
    meta = AttentionMeta(
        table=table,
        rows=rows,
        q_start=starts,
        kv_lens=kv_lens,
        max_q=1,
        max_kv=max(lengths, default=0),
        num_decodes=len(lengths),
        q_lens_host=[1] * len(lengths),
        kv_lens_host=lengths,
    )
    return Ends(at, meta)
