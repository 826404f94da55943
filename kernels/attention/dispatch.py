"""One step's attention: which kernel takes which items."""

from __future__ import annotations

import torch

from .cold import all_cold, cold, cold_item, run_of
from .decode import decode
from .extend import extend
from .meta import AttentionMeta
from .tree import tree_decode


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMeta,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    invariant: bool = False,
    pdl: bool = False,
) -> torch.Tensor:
    """Attention of q [T, Hq, D] over the paged KV that `meta` describes: [T, Hq, D]; `lse` [T, Hq]
    float32 if given.

    With `meta.tree` all items go to `tree_decode`, unless there is a window. Else the first
    `meta.num_decodes` items (all, if no item has two queries) go to `decode`, the rest to `extend`,
    or, long whole prompts, to torch. `invariant`: one kernel and one order of summing for
    every token, whatever the batch, the chunks or the cache, so that its result is the same to the
    bit. Raises what those raise.
    """
    items = len(meta.rows)
    # The last node of a tree may be a single query, but does not see all.
    single = meta.max_q <= 1 and meta.ancestry is None
    decodes = items if single else meta.num_decodes
    plain = softcap == 0 and sinks is None and lse is None and not invariant
    plain = plain and meta.ancestry is None
    whole = plain and (not window or window >= meta.max_kv) and all_cold(meta, decodes)
    if out is None:
        if whole and items == 1:
            return cold_item(
                q, k_cache, v_cache, meta.table, meta.rows, scale, first=run_of(meta, 0),
                k_scale=k_scale, v_scale=v_scale,
            )  # fmt: skip
        out = torch.empty_like(q)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    options = {"window": window, "softcap": softcap, "sinks": sinks, **scales}
    if invariant:
        return extend(
            q, k_cache, v_cache, meta, scale, **options, out=out, lse=lse, splits=1, invariant=True
        )
    if meta.tree is not None and (not window or window >= meta.max_kv):
        return tree_decode(
            q, k_cache, v_cache, meta.table, meta.kv_lens, meta.tree, scale, softcap, sinks,
            k_scale=k_scale, v_scale=v_scale, out=out, lse=lse, pdl=pdl,
        )  # fmt: skip
    if decodes:
        decode(
            q[:decodes], k_cache, v_cache, meta, scale, **options,
            out=out[:decodes], lse=None if lse is None else lse[:decodes], pdl=pdl,
        )  # fmt: skip
    if decodes == items:
        return out
    rest, rest_out = q[decodes:], out[decodes:]
    if whole:
        cold(rest, k_cache, v_cache, meta, scale, **scales, out=rest_out, first_item=decodes)
        return out
    extend(
        rest, k_cache, v_cache, meta, scale, **options,
        out=rest_out, lse=None if lse is None else lse[decodes:], first_item=decodes, pdl=pdl,
    )  # fmt: skip
    return out
