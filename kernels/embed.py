"""Token embedding: gather rows of a table. Reference: `reference.embed`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import after_previous, ceil_div, power_of_two, require, start


@triton.jit
def embed_kernel(
    ids,
    weight,
    out,
    scale,
    VOCABULARY: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    after_previous(PDL)
    row = tl.load(ids + token).to(tl.int64)
    # An id outside the table (padding) reads nothing and gives zeros.
    known = (row >= 0) & (row < VOCABULARY)
    value = tl.load(weight + row * WIDTH + column, mask=known & (column < WIDTH), other=0.0)
    if SCALED:
        value = (value.to(tl.float32) * scale).to(out.dtype.element_ty)
    tl.store(out + token * WIDTH + column, value, mask=column < WIDTH)


def embed(
    ids: torch.Tensor,
    weight: torch.Tensor,
    scale: float = 1.0,
    *,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Rows ids [T] int32 of weight [V, H], times scale: [T, H]. Ids outside [0, V) give zeros.

    Raises ValueError for a table that is not contiguous.
    """
    require(weight.is_contiguous(), "weight must be contiguous")
    vocabulary, width = weight.shape
    if out is None:
        out = torch.empty(len(ids), width, dtype=weight.dtype, device=weight.device)
    if len(ids) == 0:
        return out
    block = min(power_of_two(width), 1024)
    start(
        embed_kernel,
        (len(ids), ceil_div(width, block)),
        ids,
        weight,
        out,
        scale,
        VOCABULARY=vocabulary,
        WIDTH=width,
        BLOCK=block,
        SCALED=scale != 1.0,
        device=weight.device,
        pdl=pdl,
        warps=4,
    )
    return out


def cost(tokens: int, width: int, size: int) -> tuple[int, int]:
    """(bytes moved, operations) of one call, for elements of `size` bytes."""
    return tokens * (2 * width * size + 4), 0
