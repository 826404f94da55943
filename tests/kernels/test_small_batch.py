"""Products of a few rows, with what is fused around them, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from ramet.kernels.operands import Rotation
from ramet.kernels.reference.rope import rope_write
from ramet.kernels.small_batch import (
    Plan,
    linear_add,
    norm_gate_up,
    norm_linear,
    norm_rotate,
    small_linear,
)

ONE_ROW = [Plan(2, 128, 4, 0), Plan(4, 64, 2, 0), Plan(8, 256, 4, 3)]
FEW_ROWS = [
    Plan(16, 32, 4, 3, slices=4),
    Plan(32, 64, 4, 4, slices=1),
    Plan(16, 16, 2, 2, slices=2),
]
HALF = [torch.float16, torch.bfloat16]


class Case:
    def __init__(self, rows, n, k, dtype, device):
        torch.manual_seed(n + k)
        self.x = torch.randn(rows, k).to(dtype).to(device)
        self.weight = (torch.randn(n, k) * k**-0.5).to(dtype).to(device)
        self.bias = torch.randn(n).to(dtype).to(device)
        self.norm = torch.randn(k).to(dtype).to(device)

    def exact(self, normed=False, offset=0.0, bias=False):
        x, weight = self.x.double().cpu(), self.weight.double().cpu()
        if normed:
            x = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
            x = x * (self.norm.double().cpu() + offset)
        y = x @ weight.T
        return y + self.bias.double().cpu() if bias else y


def plans(rows):
    return FEW_ROWS if rows > 1 else ONE_ROW + FEW_ROWS[:1]


shapes = st.tuples(
    st.sampled_from([1, 2, 5, 8, 13]),
    st.sampled_from([16, 40, 100]),
    st.sampled_from([64, 192, 300]),
)


@pytest.mark.parametrize("dtype", HALF)
@given(shape=shapes, pick=st.integers(0, 3), bias=st.booleans())
@settings(max_examples=12, derandomize=True, deadline=None)
def test_small_linear(shape, pick, bias, dtype, device, close, poisoned):
    rows, n, k = shape
    case, plan = Case(rows, n, k, dtype, device), plans(rows)[pick % len(plans(rows))]
    out = poisoned(rows, n, dtype=dtype)
    small_linear(case.x, case.weight, case.bias if bias else None, out=out, plan=plan)
    close(out, case.exact(bias=bias))


@pytest.mark.parametrize("dtype", HALF)
@given(shape=shapes, pick=st.integers(0, 3), offset=st.sampled_from([0.0, 1.0]))
@settings(max_examples=12, derandomize=True, deadline=None)
def test_norm_linear(shape, pick, offset, dtype, device, close, poisoned):
    rows, n, k = shape
    case, plan = Case(rows, n, k, dtype, device), plans(rows)[pick % len(plans(rows))]
    out = poisoned(rows, n, dtype=dtype)
    x, norm = case.x, case.norm
    norm_linear(x, norm, 1e-5, case.weight, case.bias, offset=offset, out=out, plan=plan)
    close(out, case.exact(normed=True, offset=offset, bias=True))


@pytest.mark.parametrize("dtype", HALF)
@given(shape=shapes, pick=st.integers(0, 3))
@settings(max_examples=8, derandomize=True, deadline=None)
def test_linear_add(shape, pick, dtype, device, close):
    rows, n, k = shape
    case, plan = Case(rows, n, k, dtype, device), plans(rows)[pick % len(plans(rows))]
    residual = torch.randn(rows, n).to(dtype).to(device)
    want = residual.double().cpu() + case.exact()
    assert linear_add(case.x, case.weight, residual, plan=plan) is residual
    close(residual, want)


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", HALF)
@given(shape=shapes, pick=st.integers(0, 3))
@settings(max_examples=6, derandomize=True, deadline=None)
def test_norm_gate_up(shape, pick, dtype, act, device, close, poisoned):
    rows, n, k = shape
    case, plan = Case(rows, 2 * n, k, dtype, device), plans(rows)[pick % len(plans(rows))]
    out = poisoned(rows, n, dtype=dtype)
    norm_gate_up(case.x, case.norm, 1e-5, case.weight, act, out=out, plan=plan)
    gate, up = case.exact(normed=True).chunk(2, dim=1)
    if act == "silu":
        want = torch.nn.functional.silu(gate) * up
    else:
        want = torch.nn.functional.gelu(gate, approximate="tanh") * up
    close(out, want)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("rows", [1, 5, 13])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (3, 1, 16), (2, 2, 128)])
def test_norm_rotate(rows, heads, kv_heads, dim, dtype, device, close, poisoned):
    """Projection, rotation and the write of K and V at once, against one after the other."""
    case = Case(rows, (heads + 2 * kv_heads) * dim, 192, dtype, device)
    angle = torch.rand(40, dim // 2) * 6
    cos_sin = torch.cat([angle.cos(), angle.sin()], 1)
    positions = torch.arange(rows, dtype=torch.int32) * 3
    slots = 1 + torch.randperm(29)[:rows]
    slots[rows // 2 :][:1] = -1
    caches = [poisoned(30, kv_heads, dim, dtype=dtype) for _ in range(2)]
    out = poisoned(rows, heads, dim, dtype=dtype)
    rotation = Rotation(
        positions.to(device), slots.to(device), cos_sin.to(device), *caches, heads, kv_heads, dim
    )
    norm_rotate(
        case.x, case.norm, 1e-5, case.weight, case.bias, rotation, offset=1.0, out=out,
        plan=plans(rows)[0],
    )  # fmt: skip
    want = [torch.full((30, kv_heads, dim), torch.nan, dtype=torch.float64) for _ in range(2)]
    exact = case.exact(normed=True, offset=1.0, bias=True)
    kept = slots >= 0
    q = rope_write(
        exact, positions, slots.clamp(min=0), cos_sin.double(), *want, heads, kv_heads, dim
    )  # fmt: skip
    close(out, q)
    for have, expected in zip(caches, want):
        close(have.cpu()[slots[kept]], expected[slots[kept]])
        others = torch.ones(30, dtype=torch.bool)
        others[slots[kept]] = False
        assert have.cpu()[others].isnan().all()


def test_float32_row(device, close, poisoned):
    case = Case(1, 24, 200, torch.float32, device)
    close(small_linear(case.x, case.weight, out=poisoned(1, 24)), case.exact())


def test_float32_logits_of_half_weights(device, close, poisoned):
    """The last linear gives float32, whatever the weights are."""
    for rows in (1, 3):
        case = Case(rows, 50, 128, torch.bfloat16, device)
        close(small_linear(case.x, case.weight, out=poisoned(rows, 50)), case.exact(), 1e-4)


def test_what_does_not_fit_is_refused(device):
    case = Case(2, 16, 64, torch.bfloat16, device)
    with pytest.raises(ValueError, match="takes one row"):
        small_linear(case.x, case.weight, plan=Plan(2, 64, 4, 0))
    with pytest.raises(ValueError, match="does not take rows"):
        small_linear(case.x[:, :32].contiguous(), case.weight)
    with pytest.raises(ValueError, match="17 rows"):
        small_linear(case.x.repeat(9, 1)[:17], case.weight)
    wide = Case(2, 16, 64, torch.float32, device)
    with pytest.raises(ValueError, match="float32"):
        small_linear(wide.x, wide.weight)
