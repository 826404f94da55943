"""Merge partial attention results over disjoint keys: sum of o_i exp(lse_i) / sum of exp(lse_i).

The formula is its own reference; the tests write it out in float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import EARLY, HALFWAY, after_previous, power_of_two, require, start

MOST_PARTS = 256
FEW_HEADS = 16
"""Heads up to which the linear after the merge is let start early. Its weights then come while
attention runs: 4 % of a step of one request, 1.5B shape. More heads need the room themselves."""


@triton.jit
def merged(
    partial,
    lse,
    row,
    rows,
    parts,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """(output [BLOCK_D], lse) of one row of partial [P, rows, D] and lse [P, rows], float32.

    A part whose lse is -inf saw no key; its output is not read, so it need not be written. Loads go
    past the first-level cache: other multiprocessors may have written what they read, in the same
    launch.
    """
    p = tl.arange(0, BLOCK_P)
    place = lse + p.to(tl.int64) * rows + row
    each = tl.load(place, mask=p < parts, other=float("-inf"), cache_modifier=".cg")
    top = tl.max(each, axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(each - base), axis=0)
    d = tl.arange(0, BLOCK_D)
    c = tl.arange(0, CHUNK)
    out = tl.zeros([BLOCK_D], dtype=tl.float32)
    # A short item fills the first few of the parts there are for a long one.
    last = tl.max(tl.where(each > float("-inf"), p + 1, 0), axis=0)
    for first in range(0, last, CHUNK):
        part = first + c
        again = lse + part.to(tl.int64) * rows + row
        one = tl.load(again, mask=part < parts, other=float("-inf"), cache_modifier=".cg")
        some = one > float("-inf")
        value = tl.load(
            partial + (part.to(tl.int64) * rows + row)[:, None] * D + d[None, :],
            mask=some[:, None] & (d < D)[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        out += tl.sum(value * tl.exp(one - base)[:, None], axis=0)
    seen = total > 0.0
    divisor = tl.where(seen, total, 1.0)
    return out / divisor, tl.where(seen, base + tl.log(divisor), float("-inf"))


@triton.jit(do_not_specialize=["rows", "parts"])
def merge_kernel(
    partial,
    lse,
    out,
    lse_out,
    rows,
    parts,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    CHUNK: tl.constexpr,
    LSE: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    after_previous(PDL)
    value, total = merged(partial, lse, row, rows, parts, D, BLOCK_D, BLOCK_P, CHUNK)
    d = tl.arange(0, BLOCK_D)
    tl.store(out + row * D + d, value.to(out.dtype.element_ty), mask=d < D)
    if LSE:
        tl.store(lse_out + row, total)


def merge(
    partial: torch.Tensor,
    lse: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse_out: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    pdl: bool = False,
) -> torch.Tensor:
    """Merge partial [P, T, H, D] with lse [P, T, H] (natural, -inf: no keys), both float32: [T, H,
    D].

    `out` fixes the dtype of the result, else `dtype` does; `lse_out` [T, H] takes the merged lse.
    Rows without keys give zeros and -inf. Raises ValueError for more than `MOST_PARTS` parts or
    shapes that do not fit.
    """
    parts, tokens, heads, dim = partial.shape
    require(parts <= MOST_PARTS, f"{parts} parts are more than {MOST_PARTS}")
    require(lse.shape == partial.shape[:3], "lse must be [P, T, H]")
    require(partial.is_contiguous() and lse.is_contiguous(), "parts must be contiguous")
    if out is None:
        out = torch.empty(tokens, heads, dim, dtype=dtype, device=partial.device)
    if out.numel() == 0:
        return out
    start(
        merge_kernel,
        (tokens * heads,),
        partial,
        lse,
        out,
        lse if lse_out is None else lse_out,
        tokens * heads,
        parts,
        D=dim,
        BLOCK_D=power_of_two(dim),
        BLOCK_P=power_of_two(parts),
        CHUNK=min(power_of_two(parts), 16),
        LSE=lse_out is not None,
        device=partial.device,
        pdl=pdl,
        release=EARLY if tokens * heads <= FEW_HEADS else HALFWAY,
        warps=1,
    )
    return out


def cost(parts: int, rows: int, dim: int, size: int) -> tuple[int, int]:
    """(bytes moved, operations) of merging `parts` of `rows` heads into elements of `size`
    bytes."""
    return rows * (parts * (dim + 1) * 4 + dim * size), rows * parts * dim * 2
