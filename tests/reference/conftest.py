"""Ragged batches over scattered slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from ramet.kernels.attention.meta import AttentionMeta


@dataclass
class Paged:
    """Queries, caches and who attends to what."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    meta: AttentionMeta


@pytest.fixture(scope="session")
def paged() -> Callable[..., Paged]:
    def make(
        q_lens: list[int],
        kv_lens: list[int],
        *,
        decodes: int,
        kv_heads: int = 2,
        group: int = 3,
        dim: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        runs: bool = False,
        shared: int = 0,
    ) -> Paged:
        """``runs``: slots follow each other; ``shared``: the items' first slots are the same."""
        g = torch.Generator().manual_seed(seed)
        items, width = len(q_lens), max(*kv_lens, 1) + 3
        slots = items * width + 7
        order = torch.arange(slots) if runs else torch.randperm(slots, generator=g)
        table = order[: items * width].view(items, width).clone()
        table[:, :shared] = table[0, :shared]
        rows = torch.randperm(items, generator=g)
        k = torch.randn(slots, kv_heads, dim, generator=g).to(dtype)
        v = torch.randn(slots, kv_heads, dim, generator=g).to(dtype)
        q = torch.randn(sum(q_lens), kv_heads * group, dim, generator=g).to(dtype)
        meta = AttentionMeta(
            table=table.int(),
            rows=rows.int(),
            q_start=torch.tensor([0, *q_lens]).cumsum(0).int(),
            kv_lens=torch.tensor(kv_lens).int(),
            max_q=max(q_lens),
            max_kv=max(kv_lens),
            num_decodes=decodes,
        )
        return Paged(q, k, v, meta)

    return make
