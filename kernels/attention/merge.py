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
def part_of_row(partial, lse, row, rows, parts, part, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """(lse [C], output [C, BLOCK_D]) of parts [C] of one row; of one without keys, anything."""
    d = tl.arange(0, BLOCK_D)
    there = part < parts
    place = part.to(tl.int64) * rows + row
    value = tl.load(
        partial + place[:, None] * D + d[None, :],
        mask=there[:, None] & (d < D)[None, :],
        other=0.0,
    )
    return tl.load(lse + place, mask=there, other=float("-inf")), value


@triton.jit
def weighted(lse, value, base):
    """Sum over C of value [C, D] times exp(lse [C] - base), where there is a key."""
    some = lse > float("-inf")
    return tl.sum(tl.where(some[:, None], value * tl.exp(lse - base)[:, None], 0.0), axis=0)


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

    A part whose lse is -inf saw no key; its output does not count, so it need not be written. The
    first CHUNK parts, mostly all that are filled, are asked for before it is known which count: a
    step waits for its merges, and loads that wait for each other are what they take.
    """
    p = tl.arange(0, BLOCK_P)
    c = tl.arange(0, CHUNK)
    each = tl.load(lse + p.to(tl.int64) * rows + row, mask=p < parts, other=float("-inf"))
    one, value = part_of_row(partial, lse, row, rows, parts, c, D, BLOCK_D)  # pyright: ignore
    top = tl.max(each, axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(each - base), axis=0)
    out = weighted(one, value, base)
    # A short item fills the first few of the parts there are for a long one.
    last = tl.max(tl.where(each > float("-inf"), p + 1, 0), axis=0)
    for first in range(CHUNK, last, CHUNK):
        one, value = part_of_row(  # pyright: ignore
            partial, lse, row, rows, parts, first + c, D, BLOCK_D
        )
        out += weighted(one, value, base)
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
        CHUNK=min(power_of_two(parts), 8),
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
