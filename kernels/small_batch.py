"""A decoder's linears for 1 to 16 rows, with what surrounds them fused in. Kernels in `gemv`.

References: `reference.linear` with `reference.norm` and `reference.activation` around it. Results
differ from those in rounding only: what the unfused path rounds between two kernels stays in
float32 here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .gemv import few_rows_kernel, one_row_kernel
from .launch import EARLY, ceil_div, require, start
from .norm import rms_norm
from .operands import Rotation
from .rope import slot_stride

MOST_ROWS = 16


class Plan(NamedTuple):
    """How one product is cut. `slices` 0: the kernel of one row; else the tensor-core kernel, whose
    slices of K are `block_k` wide. `inside`: a norm before it is taken in the same kernel.
    `before`: tiles of weight that the kernel of one row loads before x is there."""

    block_n: int
    block_k: int
    warps: int
    stages: int
    slices: int = 0
    inside: int = 1
    before: int = 1


def default_plan(rows: int, n: int, k: int) -> Plan:
    """A plan that is right for any shape and good for most."""
    if rows == 1:
        small = n <= 4096
        return Plan(2 if small else 8, 1024 if small else 512, 4, 0)
    return Plan(16, 64, 4, 4, slices=4)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: torch.Tensor | None,
    eps: float,
    offset: float,
    act: str,
    out: torch.Tensor,
    add: bool,
    plan: Plan | None,
    pdl: bool,
    rotation: Rotation | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    rows, width = x.shape
    outputs = weight.shape[0] // 2 if act or rotation else weight.shape[0]
    require(x.is_contiguous() and weight.is_contiguous(), "x and weight must be contiguous")
    require(weight.shape[1] == width, f"weight {tuple(weight.shape)} does not take rows of {width}")
    if rotation is None:
        require(out.is_contiguous() and out.shape == (rows, outputs), "out has another shape")
    require(0 < rows <= MOST_ROWS, f"{rows} rows; from 1 to {MOST_ROWS} are taken")
    require(norm is None or norm.shape == (width,), f"norm weight must be [{width}]")
    plan = plan or default_plan(rows, outputs, width)
    if norm is not None and not plan.inside:
        x, norm = rms_norm(x, norm, eps, offset, pdl=pdl), None
    require(plan.slices > 0 or rows == 1, f"{plan} takes one row")
    require(plan.slices == 0 or x.dtype != torch.float32, "tensor cores would round float32")
    pointers = (
        x,
        weight,
        x if bias is None else bias,
        x if norm is None else norm,
        out,
        eps,
        offset,
        *_places(rotation, x, 1.0 / k_scale, 1.0 / v_scale),
    )
    grid = (ceil_div(outputs, plan.block_n),)
    flags = {"NORM": norm is not None, "BIAS": bias is not None, "ACT": act, "ADD": add}
    flags |= _layout(rotation)
    sizes = {"N": outputs, "K": width, "BLOCK_N": plan.block_n, "BLOCK_K": plan.block_k}
    if plan.slices == 0:
        start(
            one_row_kernel, grid, *pointers, **sizes, **flags, STAGES=plan.stages,
            BEFORE=plan.before, device=x.device, pdl=pdl, release=EARLY, warps=plan.warps,
        )  # fmt: skip
        return out
    start(
        few_rows_kernel, grid, *pointers, rows, **sizes, **flags, SLICES=plan.slices,
        BLOCK_M=8 if rows <= 8 else 16, device=x.device, pdl=pdl, release=EARLY,
        warps=plan.warps, stages=plan.stages,
    )  # fmt: skip
    return out


def _places(
    rotation: Rotation | None, x: torch.Tensor, k_inverse: float, v_inverse: float
) -> tuple[torch.Tensor | float, ...]:
    """The kernels' arguments of a rotation; x stands for what is not there."""
    if rotation is None:
        return (x, x, x, x, x, 1.0, 1.0)
    one = rotation
    return (
        one.positions, one.slots, one.cos_sin, one.k_cache, one.v_cache, k_inverse, v_inverse
    )  # fmt: skip


def _layout(rotation: Rotation | None) -> dict[str, int | bool]:
    """The kernels' constants of a rotation."""
    if rotation is None:
        return {"ROTATED": False, "HEADS": 1, "KV_HEADS": 1, "D": 2, "SLOT_STRIDE": 0}
    return {
        "ROTATED": True,
        "HEADS": rotation.heads,
        "KV_HEADS": rotation.kv_heads,
        "D": rotation.head_dim,
        "SLOT_STRIDE": slot_stride(rotation.k_cache, rotation.v_cache, rotation.head_dim),
    }


def _empty(x: torch.Tensor, width: int, out: torch.Tensor | None) -> torch.Tensor:
    return torch.empty(len(x), width, dtype=x.dtype, device=x.device) if out is None else out


def small_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    plan: Plan | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """x [M, K], 1 to 16 rows, times weight [N, K] transposed, plus bias [N]: [M, N] of x's or
    `out`'s dtype.

    Float32 takes one row only. Raises ValueError for shapes or a plan that do not fit.
    """
    out = _empty(x, len(weight), out)
    return _launch(x, weight, bias, None, 0.0, 0.0, "", out, False, plan, pdl)


def norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    offset: float = 0.0,
    out: torch.Tensor | None = None,
    plan: Plan | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """`small_linear` of the RMS norm of x: linear(x / rms(x) * (norm_weight [K] + offset))."""
    out = _empty(x, len(weight), out)
    return _launch(x, weight, bias, norm_weight, eps, offset, "", out, False, plan, pdl)


def linear_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    plan: Plan | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """residual [M, N] += `small_linear` of x, in place; returns residual, which x must not
    overlap."""
    return _launch(x, weight, bias, None, 0.0, 0.0, "", residual, True, plan, pdl)


def norm_rotate(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rotation: Rotation,
    *,
    offset: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    plan: Plan | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """`rope.rope_write` of `norm_linear`: q [M, Hq, D]; K and V go to their slots (a negative one
    takes nothing). All D dimensions of a head are rotated; `rotation.slots` is int64."""
    heads, dim = rotation.heads, rotation.head_dim
    height = (heads + 2 * rotation.kv_heads) * dim
    require(weight.shape[0] == height, f"weight must have {height} rows, it has {len(weight)}")
    require(rotation.cos_sin.shape[1] == dim, f"only {rotation.cos_sin.shape[1]} of {dim} turn")
    require(rotation.slots.dtype == torch.int64, "slots are int64")
    plan = plan or default_plan(len(x), height // 2, x.shape[1])
    least = 1 if plan.slices == 0 else 16
    # As many rows of weight a program as without the rotation: each output has a partner.
    plan = plan._replace(block_n=max(plan.block_n // 2, least))
    if out is None:
        out = torch.empty(len(x), heads, dim, dtype=weight.dtype, device=x.device)
    return _launch(
        x, weight, bias, norm_weight, eps, offset, "", out, False, plan, pdl, rotation, k_scale,
        v_scale,
    )  # fmt: skip


def norm_gate_up(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    act: str,
    *,
    offset: float = 0.0,
    out: torch.Tensor | None = None,
    plan: Plan | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """act(gate) * up of the RMS norm of x, where weight [2 F, K] holds the rows of gate, then of
    up: [M, F]."""
    out = _empty(x, len(weight) // 2, out)
    return _launch(x, weight, None, norm_weight, eps, offset, act, out, False, plan, pdl)


def gate_up(
    x: torch.Tensor,
    weight: torch.Tensor,
    act: str,
    *,
    out: torch.Tensor | None = None,
    plan: Plan | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """`norm_gate_up` of x that is normed already: [M, F]."""
    out = _empty(x, len(weight) // 2, out)
    return _launch(x, weight, None, None, 0.0, 0.0, act, out, False, plan, pdl)


def cost(rows: int, n: int, k: int, size: int) -> tuple[int, int]:
    """(bytes moved, operations) of a product with [n, k] weights of `size` bytes an element."""
    return (n * k + rows * (n + k)) * size, 2 * rows * n * k
