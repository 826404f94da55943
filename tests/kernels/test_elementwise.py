"""Norm, embedding and gated activation against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from ramet.kernels import activation, embed, norm, step
from ramet.kernels.reference import step as reference
from ramet.kernels.rows import take_greedy

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def exact_norm(x, weight, eps, offset):
    x, weight = x.double().cpu(), weight.double().cpu()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (weight + offset)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=5, derandomize=True, deadline=None)
@given(
    rows=st.sampled_from([1, 2, 7]),
    width=st.sampled_from([64, 576, 896, 1000]),
    offset=st.sampled_from([0.0, 1.0]),
)
def test_rms_norm(rows, width, offset, dtype, device, poisoned, close):
    torch.manual_seed(rows * width)
    x = torch.randn(rows, width, device=device).to(dtype)
    weight = torch.randn(width, device=device).to(dtype)
    out = poisoned(rows, width, dtype=dtype)
    assert norm.rms_norm(x, weight, 1e-5, offset, out=out) is out
    close(out, exact_norm(x, weight, 1e-5, offset))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (3, 1536), (5, 100)])
def test_add_rms_norm(rows, width, dtype, device, poisoned, close):
    torch.manual_seed(1)
    x = torch.randn(rows, width, device=device).to(dtype)
    residual = torch.randn(rows, width, device=device).to(dtype)
    weight = torch.randn(width, device=device).to(dtype)
    total = (x.float() + residual.float()).to(dtype)
    out = norm.add_rms_norm(x, residual, weight, 1e-6, 1.0, out=poisoned(rows, width, dtype=dtype))
    assert torch.equal(residual, total), "the residual is the rounded sum, to the bit"
    close(out, exact_norm(total, weight, 1e-6, 1.0))


def test_norm_of_strided_rows(device, close):
    wide = torch.randn(4, 200, device=device)
    weight = torch.randn(64, device=device)
    close(
        norm.rms_norm(wide[:, 100:164], weight, 1e-6),
        exact_norm(wide[:, 100:164], weight, 1e-6, 0.0),
    )


def test_norm_refuses_a_weight_of_another_width(device):
    with pytest.raises(ValueError, match="weight must be"):
        norm.rms_norm(torch.zeros(2, 8, device=device), torch.ones(9, device=device), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 24.0])
def test_embed(scale, dtype, device, poisoned, close):
    weight = torch.randn(50, 72, device=device).to(dtype)
    ids = torch.tensor([3, 49, 0, 3, 17], dtype=torch.int32, device=device)
    out = embed.embed(ids, weight, scale, out=poisoned(5, 72, dtype=dtype))
    close(out, weight[ids.long()].double() * scale)


def test_embed_gives_zeros_for_padding(device, poisoned):
    weight = torch.randn(10, 32, device=device)
    ids = torch.tensor([-1, 2, 10], dtype=torch.int32, device=device)
    out = embed.embed(ids, weight, out=poisoned(3, 32))
    assert not out[0].any() and not out[2].any()
    assert torch.equal(out[1], weight[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", activation.ACTS)
@pytest.mark.parametrize(("rows", "width"), [(1, 96), (3, 700), (65, 48)])
def test_gate(rows, width, act, dtype, device, poisoned, close):
    torch.manual_seed(2)
    x = (3 * torch.randn(rows, 2 * width, device=device)).to(dtype)
    left, right = x.double().cpu().chunk(2, dim=1)
    if act == "silu":
        want = torch.nn.functional.silu(left) * right
    else:
        want = torch.nn.functional.gelu(left, approximate="tanh") * right
    close(activation.gate(x, act, out=poisoned(rows, width, dtype=dtype)), want)


def test_gate_refuses_an_unknown_act(device):
    with pytest.raises(ValueError, match="relu"):
        activation.gate(torch.zeros(1, 4, device=device), "relu")


@pytest.mark.parametrize("count", [1, 5, 300])
def test_enter_decode(count, device):
    """The same as its reference, padding rows and all."""
    torch.manual_seed(count)
    rows = torch.randperm(count + 3)[:count].to(torch.int32)
    rows[count // 2 :] = rows[count // 2]  # padding: one row, one place
    kv_lens = torch.randint(1, 40, (count,), dtype=torch.int32)
    kv_lens[count // 2 :] = 1
    slots = torch.randint(0, 1000, (count,), dtype=torch.int32)
    slots[count // 2 :] = 7
    last = torch.randint(0, 5000, (count + 3,), dtype=torch.int32)
    table = torch.full((count + 3, 40), -1, dtype=torch.int32)
    want = reference.enter_decode(rows, kv_lens, slots, last, expected := table.clone())
    inputs = [x.to(device) for x in (rows, kv_lens, slots, last, table)]
    for have, right in zip(step.enter_decode(*inputs), want):
        assert have.dtype == right.dtype
        assert torch.equal(have.cpu(), right)
    assert torch.equal(inputs[-1].cpu(), expected)


@pytest.mark.parametrize("vocabulary", [50, 20_000])
def test_take_greedy(vocabulary, device):
    logits = torch.randn(4, vocabulary)
    logits[1, 7] = torch.nan
    logits[2] = -torch.inf
    rows = torch.tensor([5, 0, 2, 3], dtype=torch.int32)
    last = torch.arange(6, dtype=torch.int32)
    want = reference.take_greedy(logits, rows, expected := last.clone())
    noted = last.to(device)
    have = take_greedy(logits.to(device), rows.to(device), noted)
    assert torch.equal(have.cpu(), want)
    assert torch.equal(noted.cpu(), expected)
