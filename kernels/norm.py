"""RMS norm, alone or with the residual added first. Reference: `reference.norm`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import after_previous, power_of_two, require, start

LARGEST_ROW = 32768


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    x_stride,
    residual_stride,
    out_stride,
    eps,
    offset,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    # The weight was there before this step began: load it while the kernel before still runs.
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + offset
    after_previous(PDL)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        place = residual + row * residual_stride + column
        total = value + tl.load(place, mask=inside, other=0.0).to(tl.float32)
        # The norm is of the sum as stored, so that it does not matter who adds it.
        rounded = total.to(residual.dtype.element_ty)
        tl.store(place, rounded, mask=inside)
        value = rounded.to(tl.float32)
    mean = tl.sum(value * value, axis=0) / WIDTH
    value = value * tl.rsqrt(mean + eps) * gain
    tl.store(out + row * out_stride + column, value.to(out.dtype.element_ty), mask=inside)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    offset: float,
    out: torch.Tensor | None,
    pdl: bool,
) -> torch.Tensor:
    require(x.dim() == 2 and x.stride(1) == 1, f"x must be [T, H], rows contiguous: {x.shape}")
    rows, width = x.shape
    require(weight.shape == (width,), f"weight must be [{width}], it is {tuple(weight.shape)}")
    require(width <= LARGEST_ROW, f"rows of {width} are wider than {LARGEST_ROW}")
    if residual is not None:
        require(residual.shape == x.shape, "residual must have the shape of x")
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if rows == 0:
        return out
    block = power_of_two(width)
    target = x if residual is None else residual
    start(
        rms_norm_kernel,
        (rows,),
        x,
        target,
        weight,
        out,
        x.stride(0),
        target.stride(0),
        out.stride(0),
        eps,
        offset,
        WIDTH=width,
        BLOCK=block,
        ADD=residual is not None,
        device=x.device,
        pdl=pdl,
        warps=min(max(block // 512, 1), 16),
    )
    return out


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float = 0.0,
    *,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """x [T, H] / rms(x) * (weight [H] + offset), float32 inside. Returns [T, H] of x's dtype.

    Raises ValueError for shapes that do not fit or rows wider than `LARGEST_ROW`.
    """
    return _launch(x, None, weight, eps, offset, out, pdl)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float = 0.0,
    *,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """residual [T, H] += x [T, H], in place, then the norm of it. Raises as `rms_norm`."""
    return _launch(x, residual, weight, eps, offset, out, pdl)


def cost(rows: int, width: int, size: int, add: bool = False) -> tuple[int, int]:
    """(bytes moved, operations) of one call, for elements of `size` bytes."""
    return rows * width * size * (4 if add else 2) + width * size, rows * width * (5 if add else 4)
