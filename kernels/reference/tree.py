"""Attention by a work list, entry by entry: the parts that `attention.tree` leaves, and the merge.

A whole step on the CPU is done otherwise: `attention_plan` finds what items share by itself.
"""

from __future__ import annotations

import torch

from ..attention.worklist import WorkList


def tree_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    kv_lens: torch.Tensor,
    work: WorkList,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `attention.tree.tree_decode`: q [B, Hq, D] to (out [B, Hq, D] in q's dtype, lse [B, Hq]
    float32). Items that the list does not know give zeros and -inf."""
    items, heads, _ = q.shape
    group = heads // k_cache.shape[1]
    parts = int(work.offsets[-1])
    partial = torch.zeros(parts, *q.shape[1:], dtype=torch.float32)
    logs = torch.full((parts, heads), -torch.inf)

    def attend(some: list[int], into: list[int], row: int, first: int, last: int) -> None:
        slots = table[row, first:last].long()
        k = k_cache[slots].float().repeat_interleave(group, 1)
        v = v_cache[slots].float().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,nhd->qhn", q[some].float(), k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        total = scores.logsumexp(2)
        logs[into] = total
        partial[into] = torch.einsum("qhn,nhd->qhd", (scores - total[..., None]).exp(), v)

    for row, first, last, line, lines, at, piece, _ in work.shared.tolist():
        if line:
            continue  # the first block of a piece stands for all of its readers
        entries = work.readers[at : at + lines // group]
        attend(entries[:, 0].tolist(), (entries[:, 1] + piece).tolist(), row, first, last)
    for row, low, pieces, piece, _, item, part, _ in work.tails.tolist():
        own = max(int(kv_lens[item]) - low, 0)
        first, last = low + own * piece // pieces, low + own * (piece + 1) // pieces
        if last > first:
            attend([item], [part], row, first, last)
    out, lse = torch.zeros_like(q), torch.full((items, heads), -torch.inf)
    for i in range(min(items, len(work.offsets) - 1)):
        mine = slice(int(work.offsets[i]), int(work.offsets[i + 1]))
        total = logs[mine].logsumexp(0) if parts else lse[i]
        if not bool((total > -torch.inf).all()):
            continue
        if sinks is not None:
            total = torch.logaddexp(total, sinks.float())
        weight = (logs[mine] - total).exp()
        out[i] = (partial[mine] * weight[..., None]).sum(0).to(q.dtype)
        lse[i] = total
    return out, lse
