"""Attention over paged KV, written for the CPU: gather once, then few large products."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..attention.meta import AttentionMeta
from .attention_plan import Keys, Plan, plan_for


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMeta,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `Ops.attention`: q [T, Hq, D] to [T, Hq, D]."""
    if softcap or sinks is not None:
        return attention_lse(q, k_cache, v_cache, meta, scale, window, softcap, sinks)[0]
    kv_heads = k_cache.shape[1]
    out = torch.empty_like(q)
    plan = plan_for(meta, window)
    for keys in plan.pieces:
        k, v = _gather(keys, k_cache, v_cache, q.dtype)
        x, fold = _fold(q, keys, kv_heads)
        mask = keys.mask
        if mask is not None:
            mask = mask.to(q.dtype)
            if keys.queries > 1:
                mask = mask.repeat(1, 1, fold, 1)
        y = F.scaled_dot_product_attention(x, k, v, attn_mask=mask, scale=scale)
        _unfold(out, y, keys, kv_heads)
    return _blank(out, plan)


def attention_lse(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMeta,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Ops.attention_lse`: the output, and the log of each denominator [T, Hq] float32."""
    kv_heads = k_cache.shape[1]
    out = torch.empty_like(q)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32)
    plan = plan_for(meta, window)
    for keys in plan.pieces:
        k, v = _gather(keys, k_cache, v_cache, torch.float32)
        x, fold = _fold(q.float(), keys, kv_heads)
        scores = (x @ k.transpose(-1, -2)).mul_(scale)
        if softcap:
            scores.div_(softcap).tanh_().mul_(softcap)
        if keys.mask is not None:
            scores += keys.mask.repeat(1, 1, fold, 1) if keys.queries > 1 else keys.mask
        total = scores.logsumexp(dim=-1, keepdim=True)
        if sinks is not None:
            extra = sinks.float().view(1, kv_heads, fold, 1)
            extra = extra.repeat_interleave(keys.queries, dim=2)
            total = torch.logaddexp(total, extra)
        y = torch.exp(scores - total) @ v
        _unfold(out, y.to(q.dtype), keys, kv_heads)
        _unfold(lse.unsqueeze(-1), total, keys, kv_heads)
    _blank(lse, plan, -torch.inf)
    return _blank(out, plan), lse


def _gather(
    keys: Keys, k_cache: torch.Tensor, v_cache: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one piece as [items, Hk, length, D]; a view where the slots are one run."""
    if keys.index is None:
        k = k_cache[keys.start : keys.start + keys.length]
        v = v_cache[keys.start : keys.start + keys.length]
    else:
        k, v = k_cache.index_select(0, keys.index), v_cache.index_select(0, keys.index)
    shape = (keys.items, keys.length, *k_cache.shape[1:])
    return k.view(shape).transpose(1, 2).to(dtype), v.view(shape).transpose(1, 2).to(dtype)


def _fold(q: torch.Tensor, keys: Keys, kv_heads: int) -> tuple[torch.Tensor, int]:
    """Queries of one piece as [items, Hk, fold * queries, D]: heads of a group read the same keys,
    so they become rows of one product. Returns them and the heads a group has."""
    heads, dim = q.shape[1:]
    fold = heads // kv_heads
    x = q[keys.first : keys.first + keys.items * keys.queries]
    if keys.queries == 1:
        return x.view(keys.items, kv_heads, fold, dim), fold
    x = x.view(keys.queries, kv_heads, fold, dim).permute(1, 2, 0, 3)
    return x.reshape(1, kv_heads, fold * keys.queries, dim), fold


def _unfold(out: torch.Tensor, y: torch.Tensor, keys: Keys, kv_heads: int) -> None:
    """Write what `_fold`'s rows gave to their places in ``out`` [T, Hq, D]."""
    heads, dim = out.shape[1:]
    rows = out[keys.first : keys.first + keys.items * keys.queries]
    if keys.queries == 1:
        rows.copy_(y.reshape(keys.items, heads, dim))
    else:
        y = y.view(kv_heads, heads // kv_heads, keys.queries, dim)
        rows.view(keys.queries, kv_heads, heads // kv_heads, dim).copy_(y.permute(2, 0, 1, 3))


def _blank(x: torch.Tensor, plan: Plan, value: float = 0.0) -> torch.Tensor:
    """Items without any key have no output: give their queries a harmless one."""
    for first, last in plan.empty:
        x[first:last] = value
    return x


def attention_exact(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMeta,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula in float64, one query at a time: (out [T, Hq, D], lse [T, Hq]), both float64."""
    group = q.shape[1] // k_cache.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    starts, kv_lens = meta.q_start.tolist(), meta.kv_lens.tolist()
    for i, row in enumerate(meta.rows.tolist()):
        for t in range(starts[i], starts[i + 1]):
            position = kv_lens[i] - starts[i + 1] + t
            low = max(0, position + 1 - window) if window else 0
            if position < 0:
                continue
            slots = meta.table[row, low : position + 1].cpu()
            k = k_cache[slots.long()].double().repeat_interleave(group, dim=1)
            v = v_cache[slots.long()].double().repeat_interleave(group, dim=1)
            scores = torch.einsum("hd,lhd->hl", q[t].double(), k) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            total = scores.logsumexp(dim=-1)
            if sinks is not None:
                total = torch.logaddexp(total, sinks.double())
            out[t] = torch.einsum("hl,lhd->hd", torch.exp(scores - total[:, None]), v)
            lse[t] = total
    return out, lse
