"""Prefill of whole prompts by torch's own fused attention, which is faster than ours where nothing
is cached.

Reference: `reference.attention`. Where K and V do not lie in one run of slots, they are gathered
first: a copy of megabytes before a product of teraflops.
"""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .meta import AttentionMeta

SHORTEST = 1024
"""Prompt tokens from which the copy pays."""
MOST_ITEMS = 4
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


def all_cold(meta: AttentionMeta, first_item: int) -> bool:
    """Whether the host knows that every item from `first_item` on is a long prompt, whole and
    uncached."""
    if meta.q_lens_host is None or meta.kv_lens_host is None:
        return False
    q_lens, kv_lens = meta.q_lens_host[first_item:], meta.kv_lens_host[first_item:]
    return 0 < len(q_lens) <= MOST_ITEMS and q_lens == kv_lens and min(q_lens) >= SHORTEST


def run_of(meta: AttentionMeta, item: int) -> int:
    """The first of consecutive slots of an item; -1 where they are not known to be so."""
    return -1 if meta.runs_host is None else meta.runs_host[item]


def cold_item(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    row: torch.Tensor,
    scale: float,
    *,
    first: int = -1,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Causal attention of q [T, Hq, D] over the T tokens of a row [1] of the table, which lie in
    consecutive slots if `first`, the first one, is not negative: [T, Hq, D]."""
    if first >= 0:
        caches = [cache[first : first + len(q)] for cache in (k_cache, v_cache)]
    else:
        slots = table.index_select(0, row)[0, : len(q)]
        caches = [cache.index_select(0, slots) for cache in (k_cache, v_cache)]
    # [1, heads, T, D] as views: the library takes any strides and gives back those of q.
    k, v = (cache.to(q.dtype).transpose(0, 1)[None] for cache in caches)
    grouped = q.shape[1] != k_cache.shape[1]
    with sdpa_kernel(BACKENDS, set_priority=True):
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k, v, is_causal=True, scale=scale * k_scale, enable_gqa=grouped
        )
    out = out[0].transpose(0, 1).contiguous()
    return out if v_scale == 1.0 else out.mul_(v_scale)


def cold(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMeta,
    scale: float,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor,
    first_item: int = 0,
) -> torch.Tensor:
    """`extend` for items for which `all_cold` holds: a few kernels an item."""
    assert meta.q_lens_host is not None
    lengths = meta.q_lens_host[first_item:]
    for i, end in enumerate(accumulate(lengths)):
        begin, item = end - lengths[i], first_item + i
        out[begin:end] = cold_item(
            q[begin:end], k_cache, v_cache, meta.table, meta.rows[item : item + 1], scale,
            first=run_of(meta, item), k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
    return out
