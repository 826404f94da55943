"""Products of up to 256 rows, whole and in slices, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from ramet.kernels.mid_batch import Tiles, mid_gate_up, mid_linear, mid_linear_add, sum_parts
from ramet.kernels.operands import Norm

CUTS = [
    Tiles(64, 32, 4, 3),
    Tiles(32, 64, 4, 2, slices=2),
    Tiles(16, 16, 4, 2, slices=5),
    Tiles(64, 64, 4, 3, slices=3),
]
HALF = [torch.float16, torch.bfloat16]


def tensors(rows, n, k, dtype, device):
    torch.manual_seed(n + k)
    x = torch.randn(rows, k).to(dtype).to(device)
    weight = (torch.randn(n, k) * k**-0.5).to(dtype).to(device)
    return x, weight, torch.randn(n).to(dtype).to(device)


def product(x, weight):
    return x.double().cpu() @ weight.double().cpu().T


shapes = st.tuples(
    st.sampled_from([1, 3, 17, 33]), st.sampled_from([16, 40, 96]), st.sampled_from([64, 136, 300])
)


@pytest.mark.parametrize("dtype", HALF)
@given(shape=shapes, tiles=st.sampled_from(CUTS), bias=st.booleans(), wide=st.booleans())
@settings(max_examples=14, derandomize=True, deadline=None)
def test_mid_linear(shape, tiles, bias, wide, dtype, device, close, poisoned):
    rows, n, k = shape
    x, weight, b = tensors(rows, n, k, dtype, device)
    out = poisoned(rows, n, dtype=torch.float32 if wide else dtype)
    mid_linear(x, weight, b if bias else None, tiles=tiles, out=out)
    want = product(x, weight) + (b.double().cpu() if bias else 0)
    close(out, want, 1e-4 if wide else None)


@pytest.mark.parametrize("dtype", HALF)
@given(shape=shapes, tiles=st.sampled_from(CUTS), offset=st.sampled_from([0.0, 1.0]))
@settings(max_examples=14, derandomize=True, deadline=None)
def test_the_residual_and_its_norm(shape, tiles, offset, dtype, device, close):
    rows, n, k = shape
    x, weight, b = tensors(rows, n, k, dtype, device)
    residual = torch.randn(rows, n).to(dtype).to(device)
    want = residual.double().cpu() + product(x, weight) + b.double().cpu()
    gain = torch.randn(n).to(dtype).to(device)
    normed = mid_linear_add(
        x, weight, residual, b, tiles=tiles, norm=Norm(gain, 1e-5, offset)
    )  # fmt: skip
    close(residual, want)
    assert (normed is None) == (tiles.slices == 1)
    if normed is not None:
        exact = residual.double().cpu()
        exact = exact / (exact.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        close(normed, exact * (gain.double().cpu() + offset))


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@given(shape=shapes, tiles=st.sampled_from([c._replace(slices=1) for c in CUTS]))
@settings(max_examples=8, derandomize=True, deadline=None)
def test_mid_gate_up(shape, tiles, act, device, close, poisoned):
    rows, n, k = shape
    x, weight, _ = tensors(rows, 2 * n, k, torch.bfloat16, device)
    out = poisoned(rows, n, dtype=torch.bfloat16)
    mid_gate_up(x, weight, act, tiles=tiles, out=out)
    gate, up = product(x, weight).chunk(2, dim=1)
    acts = torch.nn.functional
    gate = acts.silu(gate) if act == "silu" else acts.gelu(gate, approximate="tanh")
    close(out, gate * up)


def test_a_residual_without_a_norm(device, close):
    parts = torch.randn(3, 5, 24, device=device)
    residual = torch.randn(5, 24, device=device)
    want = residual.double() + parts.double().sum(0)
    assert sum_parts(parts, residual=residual) is None
    close(residual, want)


def test_what_does_not_fit_is_refused(device):
    x, weight, _ = tensors(4, 16, 64, torch.bfloat16, device)
    with pytest.raises(ValueError, match="does not take rows"):
        mid_linear(x[:, :32].contiguous(), weight, tiles=CUTS[0])
    with pytest.raises(ValueError, match="320 rows"):
        mid_linear(x.repeat(80, 1), weight, tiles=CUTS[0])
    with pytest.raises(ValueError, match="16-bit"):
        mid_linear(x.float(), weight.float(), tiles=CUTS[0])
    with pytest.raises(ValueError, match="whole sums"):
        mid_gate_up(x, weight, "silu", tiles=CUTS[1])
