"""A linear whose every row has the same bits whatever rows are beside it. Reference:
`reference.linear`.

Each output sums over K in the same order, tile by tile in one program, by the same instructions: no
split of K, and no choice by the number of rows but how wide a tile is, which no sum depends on.
Slower than `linear` for few rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import after_previous, ceil_div, require, start

FEW_ROWS = 64


@triton.jit(do_not_specialize=["rows"])
def invariant_kernel(
    x,
    weight,
    bias,
    out,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    # Programs go down GROUP tiles of rows before they go on to the next columns: both stay in
    # cache.
    across: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    down = (rows + BLOCK_M - 1) // BLOCK_M
    group = tl.program_id(0) // (GROUP * across)
    inside = tl.program_id(0) % (GROUP * across)
    height = tl.minimum(down - group * GROUP, GROUP)
    m = (group * GROUP + inside % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (inside // height) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    after_previous(PDL)
    left = x + m.to(tl.int64)[:, None] * K
    right = weight + n.to(tl.int64)[:, None] * K
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for first in range(0, K, BLOCK_K):
        column = first + k
        there = (column < K)[None, :]
        a = tl.load(left + column[None, :], mask=(m < rows)[:, None] & there, other=0.0)
        b = tl.load(right + column[None, :], mask=(n < N)[:, None] & there, other=0.0)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    place = out + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < N)[None, :])


def invariant_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N]: [T, N]; a row's bits depend on that
    row alone.

    Raises ValueError for shapes that do not fit.
    """
    rows, width = x.shape
    outputs = weight.shape[0]
    require(x.is_contiguous() and weight.is_contiguous(), "x and weight must be contiguous")
    require(weight.shape[1] == width, f"weight {tuple(weight.shape)} does not take rows of {width}")
    if out is None:
        out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    if x.dtype == torch.float32:
        block_n, block_k, stages = 32, 32, 2
    else:
        # Few rows: narrow tiles, for more programs that read weights at once.
        block_n, block_k, stages = (32, 128, 4) if rows <= FEW_ROWS else (128, 64, 4)
    block_m = 64
    start(
        invariant_kernel,
        (ceil_div(rows, block_m) * ceil_div(outputs, block_n),),
        x,
        weight,
        x if bias is None else bias,
        out,
        rows,
        N=outputs,
        K=width,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GROUP=8,
        BIAS=bias is not None,
        device=x.device,
        pdl=pdl,
        warps=4,
        stages=stages,
    )
    return out


def cost(rows: int, n: int, k: int, size: int) -> tuple[int, int]:
    """(bytes moved, operations) of a product with [n, k] weights of `size` bytes an element."""
    return (n * k + rows * (n + k)) * size, 2 * rows * n * k
