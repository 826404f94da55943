"""Gated activations: act(gate) * up. Reference: `reference.activation`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import after_previous, ceil_div, require, start

ACTS = ("silu", "gelu_tanh")


@triton.jit
def activate(x, ACT: tl.constexpr):
    """silu or tanh-gelu of float32 x; tanh(z) as 2 sigmoid(2 z) - 1, which the hardware has."""
    if ACT == "silu":
        return x * tl.sigmoid(x)
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x * tl.sigmoid(2.0 * inner)


@triton.jit
def gate_kernel(
    x,
    out,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACT: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    after_previous(PDL)
    place = x + row * 2 * WIDTH + column
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + WIDTH, mask=inside, other=0.0).to(tl.float32)
    value = activate(gate, ACT) * up
    tl.store(out + row * WIDTH + column, value.to(out.dtype.element_ty), mask=inside)


def gate(
    x: torch.Tensor, act: str, *, out: torch.Tensor | None = None, pdl: bool = False
) -> torch.Tensor:
    """act(x[:, :F]) * x[:, F:] of x [T, 2F], contiguous: [T, F]; act is one of `ACTS`.

    Raises ValueError for another act or an odd width.
    """
    require(act in ACTS, f"act is {act!r}, not one of {ACTS}")
    require(x.dim() == 2 and x.is_contiguous(), f"x must be [T, 2F], contiguous: {x.shape}")
    rows, width = x.shape[0], x.shape[1] // 2
    require(x.shape[1] == 2 * width, f"x has an odd width: {x.shape[1]}")
    if out is None:
        out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    block = 512 if rows < 64 else 2048
    start(
        gate_kernel,
        (rows, ceil_div(width, block)),
        x,
        out,
        WIDTH=width,
        BLOCK=block,
        ACT=act,
        device=x.device,
        pdl=pdl,
        warps=4,
    )
    return out


def cost(rows: int, width: int, size: int) -> tuple[int, int]:
    """(bytes moved, operations) of one call giving [rows, width] of `size` bytes an element."""
    return 3 * rows * width * size, 6 * rows * width
