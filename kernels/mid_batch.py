"""A decoder's linears for 2 to 256 rows: tensor cores fed by asynchronous copies, K cut into slices
where N alone does not fill the device.

References: `reference.linear`, with `reference.activation` after it. Weight times x transposed, so
that the rows of x are the narrow side of a product and none are computed that are not there. With
one slice the epilogue adds bias, residual or gate; with more, each slice leaves a float32 part and
`sum_parts` adds them in a fixed order, with bias, residual and the RMS norm that follows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .activation import activate
from .launch import (
    EARLY,
    HALFWAY,
    after_previous,
    ceil_div,
    power_of_two,
    require,
    start,
)
from .operands import Norm

MOST_ROWS = 256
LARGEST_WIDTH = 16384
CROWDED = 16
"""Rows above which the kernel after a sum of slices is let start early. With fewer its programs,
which take all of a multiprocessor, are in the way of the product's last: 8 rows of the 8B shape
take 2 % longer."""


class Tiles(NamedTuple):
    """How one product is cut: rows of weight and columns a tile, slices of K."""

    block_n: int
    block_k: int
    warps: int
    stages: int
    slices: int = 1


@triton.jit(do_not_specialize=["rows"])
def mid_rows_kernel(
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
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    ACT: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile of BLOCK_N rows of weight (with ACT half of them gate's, half up's) times all rows of
    x, over one slice of K."""
    GATED: tl.constexpr = ACT != ""
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    EACH: tl.constexpr = ((K + BLOCK_K - 1) // BLOCK_K + SLICES - 1) // SLICES * BLOCK_K
    EVEN: tl.constexpr = EACH * SLICES == K
    i = tl.arange(0, BLOCK_N)
    n = tl.program_id(0) * OUTPUTS + i % OUTPUTS
    # Past the end the last row is read again; what comes of it is not stored.
    line = tl.minimum(n, N - 1)
    if GATED:
        line += tl.where(i < OUTPUTS, 0, N)
    first = tl.program_id(1) * EACH
    lines = weight + line.to(tl.int64) * K + first
    m = tl.minimum(tl.arange(0, BLOCK_M), rows - 1)
    k = tl.arange(0, BLOCK_K)
    wide = lines[:, None] + k[None, :]
    narrow = x + m[None, :] * K + (first + k)[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    after_previous(PDL)
    for begin in tl.range(0, EACH, BLOCK_K, num_stages=STAGES):
        if EVEN:
            w = tl.load(wide + begin)
            value = tl.load(narrow + begin)
        else:
            inside = first + begin + k < K
            w = tl.load(wide + begin, mask=inside[None, :], other=0.0)
            value = tl.load(narrow + begin, mask=inside[:, None], other=0.0)
        acc = tl.dot(w, value, acc)
    there = tl.arange(0, BLOCK_M) < rows
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    mask = (n < N)[:, None] & there[None, :]
    if GATED:
        both = tl.permute(tl.reshape(acc, [2, OUTPUTS, BLOCK_M]), (1, 2, 0))
        y, up = tl.split(both)
        y = activate(y, ACT) * up
    else:
        y = acc
    if BIAS:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    place = m[None, :] * N + n[:, None]
    if SLICES > 1:
        place += tl.program_id(1) * rows * N
    if ADD:
        y += tl.load(out + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def sum_parts_kernel(
    parts,
    bias,
    residual,
    norm,
    out,
    rows,
    eps,
    offset,
    N: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row: the sum of its parts in order, with bias; with ADD, of the residual too, which takes
    it; with NORM the norm of the residual then goes to out."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    inside = n < N
    gain = tl.load(norm + n, mask=inside, other=0.0).to(tl.float32) + offset if NORM else 0.0
    y = (
        tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
        if BIAS
        else tl.zeros([BLOCK], tl.float32)
    )
    after_previous(PDL)
    for i in tl.static_range(SLICES):
        y += tl.load(parts + (row + i * rows) * N + n, mask=inside, other=0.0)
    if ADD:
        place = residual + row * N + n
        y += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        # The norm is of the sum as stored, so that it does not matter who adds it.
        stored = y.to(residual.dtype.element_ty)
        tl.store(place, stored, mask=inside)
        y = stored.to(tl.float32)
    if NORM:
        mean = tl.sum(y * y, axis=0) / N
        y = y * tl.rsqrt(mean + eps) * gain
    if NORM or not ADD:
        tl.store(out + row * N + n, y.to(out.dtype.element_ty), mask=inside)


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tiles: Tiles,
    act: str = "",
    add: bool = False,
    pdl: bool = False,
) -> None:
    rows, width = x.shape
    outputs = weight.shape[0] // 2 if act else weight.shape[0]
    require(x.is_contiguous() and weight.is_contiguous(), "x and weight must be contiguous")
    require(weight.shape[1] == width, f"weight {tuple(weight.shape)} does not take rows of {width}")
    require(0 < rows <= MOST_ROWS, f"{rows} rows; from 1 to {MOST_ROWS} are taken")
    require(x.dtype == weight.dtype and x.dtype != torch.float32, "16-bit x and weight are taken")
    block_n = tiles.block_n // 2 if act else tiles.block_n
    start(
        mid_rows_kernel,
        (ceil_div(outputs, block_n), tiles.slices),
        x,
        weight,
        x if bias is None else bias,
        out,
        rows,
        N=outputs,
        K=width,
        BLOCK_M=max(16, power_of_two(rows)),
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        SLICES=tiles.slices,
        STAGES=tiles.stages,
        BIAS=bias is not None,
        ACT=act,
        ADD=add,
        device=x.device,
        pdl=pdl,
        release=EARLY,
        warps=tiles.warps,
        stages=tiles.stages,
    )


def sum_parts(
    parts: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: Norm | None = None,
    *,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor | None:
    """Sum parts [P, T, N] float32, plus bias [N]: [T, N]. With `residual` [T, N] it is added there
    in place instead, and returned is None, or with `norm` that of the residual.

    Raises ValueError for shapes that do not fit or rows wider than `LARGEST_WIDTH`.
    """
    slices, rows, width = parts.shape
    require(parts.is_contiguous() and parts.dtype == torch.float32, "parts must be float32")
    require(width <= LARGEST_WIDTH, f"rows of {width} are wider than {LARGEST_WIDTH}")
    require(norm is None or residual is not None, "a norm is of the residual")
    if residual is not None:
        require(residual.shape == (rows, width) and residual.is_contiguous(), "residual differs")
    if out is None and (norm is not None or residual is None):
        like = bias if residual is None else residual
        dtype = torch.bfloat16 if like is None else like.dtype
        out = torch.empty(rows, width, dtype=dtype, device=parts.device)
    if rows:
        block = power_of_two(width)
        start(
            sum_parts_kernel,
            (rows,),
            parts,
            parts if bias is None else bias,
            parts if residual is None else residual,
            parts if norm is None else norm.weight,
            parts if out is None else out,
            rows,
            0.0 if norm is None else norm.eps,
            0.0 if norm is None else norm.offset,
            N=width,
            SLICES=slices,
            BLOCK=block,
            BIAS=bias is not None,
            ADD=residual is not None,
            NORM=norm is not None,
            device=parts.device,
            pdl=pdl,
            release=EARLY if rows > CROWDED else HALFWAY,
            # Rows are few: only many warps have all of a row's parts in flight.
            warps=min(max(block // 128, 1), 16),
        )
    return out


def mid_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tiles: Tiles,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N]: [M, N] of x's or `out`'s dtype.

    16-bit x and weight, 1 to 256 rows. Raises ValueError for shapes that do not fit.
    """
    rows = len(x)
    if out is None:
        out = torch.empty(rows, len(weight), dtype=x.dtype, device=x.device)
    if tiles.slices == 1:
        _product(x, weight, bias, out, tiles, pdl=pdl)
        return out
    parts = torch.empty(tiles.slices, rows, len(weight), dtype=torch.float32, device=x.device)
    _product(x, weight, None, parts, tiles, pdl=pdl)
    sum_parts(parts, bias, out=out, pdl=pdl)
    return out


def mid_linear_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tiles: Tiles,
    norm: Norm | None = None,
    pdl: bool = False,
) -> torch.Tensor | None:
    """residual [M, N] += `mid_linear` of x, in place. Returns `norm` of the residual where that
    comes for nothing, else None."""
    if tiles.slices == 1:
        _product(x, weight, bias, residual, tiles, add=True, pdl=pdl)
        return None
    parts = torch.empty(tiles.slices, *residual.shape, dtype=torch.float32, device=x.device)
    _product(x, weight, None, parts, tiles, pdl=pdl)
    return sum_parts(parts, bias, residual, norm, pdl=pdl)


def mid_gate_up(
    x: torch.Tensor,
    weight: torch.Tensor,
    act: str,
    *,
    tiles: Tiles,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """act(gate) * up, where weight [2 F, K] holds the rows of gate, then of up: [M, F]. `tiles`
    must be of one slice."""
    require(tiles.slices == 1, "a gate needs whole sums")
    if out is None:
        out = torch.empty(len(x), len(weight) // 2, dtype=x.dtype, device=x.device)
    _product(x, weight, None, out, tiles, act=act, pdl=pdl)
    return out


def cost(rows: int, n: int, k: int, size: int, slices: int = 1) -> tuple[int, int]:
    """(bytes moved, operations) of a product with [n, k] weights of `size` bytes an element."""
    parts = 0 if slices == 1 else 8 * slices * rows * n
    return (n * k + rows * (n + k)) * size + parts, 2 * rows * n * k
