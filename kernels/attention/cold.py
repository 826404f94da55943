"""Prefill of whole prompts by torch's own fused attention, which is faster than ours where nothing
is cached.

Reference: `reference.attention`. K and V are gathered into one run first: a copy of megabytes
before a product of teraflops.
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
    """`extend` for items for which `all_cold` holds; float8 caches are widened. Launches a few
    kernels an item."""
    assert meta.q_lens_host is not None
    lengths = meta.q_lens_host[first_item:]
    rows = meta.table.index_select(0, meta.rows[first_item:])
    group = q.shape[1] // k_cache.shape[1]
    for i, end in enumerate(accumulate(lengths)):
        begin = end - lengths[i]
        slots = rows[i, : lengths[i]]
        k = k_cache.index_select(0, slots).to(q.dtype).transpose(0, 1)[None]
        v = v_cache.index_select(0, slots).to(q.dtype).transpose(0, 1)[None]
        with sdpa_kernel(BACKENDS, set_priority=True):
            result = F.scaled_dot_product_attention(
                q[begin:end].transpose(0, 1)[None],
                k,
                v,
                is_causal=True,
                scale=scale * k_scale,
                enable_gqa=group > 1,
            )
        out[begin:end] = result[0].transpose(0, 1)
    if v_scale != 1.0:
        out.mul_(v_scale)
    return out
