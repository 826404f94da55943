"""Norms, rotation, gates, embedding and products against plain float64 formulas."""

from __future__ import annotations

import pytest
import torch
from ramet.kernels import ops as ops_module
from ramet.kernels.reference import ops

DTYPES = [torch.float32, torch.bfloat16]
LIMIT = {torch.float32: 1e-6, torch.bfloat16: 6e-3}


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert (got.double() - want).norm() < LIMIT[got.dtype] * want.norm()


def exact_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight.double() + offset)


def exact_rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """[T, heads, D] as complex numbers (first half real, second imaginary), each turned."""
    half = cos_sin.shape[1] // 2
    turn = torch.complex(*(c.double() for c in (cos_sin[:, :half], cos_sin[:, half:])))
    turned = torch.complex(x[..., :half].double(), x[..., half : 2 * half].double())
    turned = turned * turn.unsqueeze(1)
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :].double()), -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms(dtype: torch.dtype, offset: float) -> None:
    x, residual = torch.randn(5, 48).to(dtype), torch.randn(5, 48).to(dtype)
    weight = torch.randn(48).to(dtype)
    close(ops.rms_norm(x, weight, 1e-3, offset), exact_norm(x, weight, 1e-3, offset))
    close(ops.rms_norm(x * 1e-4, weight, 1e-3), exact_norm(x * 1e-4, weight, 1e-3))
    total = (x + residual).clone()
    got = ops.add_rms_norm(x, residual, weight, 1e-3, offset)
    assert torch.equal(residual, total), "the residual is summed in place"
    close(got, exact_norm(total, weight, 1e-3, offset))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates(dtype: torch.dtype) -> None:
    x = torch.randn(4, 26).to(dtype)
    a, b = x[:, :13].double(), x[:, 13:].double()
    close(ops.gate(x, "silu"), a / (1 + (-a).exp()) * b)
    inner = (2 / torch.pi) ** 0.5 * (a + 0.044715 * a**3)
    close(ops.gate(x, "gelu_tanh"), 0.5 * a * (1 + inner.tanh()) * b)
    with pytest.raises(ValueError, match="relu"):
        ops.gate(x, "relu")


def test_softcap_is_in_place() -> None:
    x = torch.randn(3, 7) * 9
    want = 4 * (x.double() / 4).tanh()
    assert ops.softcap_(x, 4.0) is x
    close(x, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_and_product(dtype: torch.dtype) -> None:
    table, bias = torch.randn(11, 6).to(dtype), torch.randn(11).to(dtype)
    ids = torch.tensor([3, 0, 10, 3], dtype=torch.int32)
    close(ops.embed(ids, table), table.double()[ids.long()])
    close(ops.embed(ids, table, 2.5), table.double()[ids.long()] * 2.5)
    x = torch.randn(4, 6).to(dtype)
    close(ops.linear(x, table, bias), x.double() @ table.double().T + bias.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary", [16, 8])
@pytest.mark.parametrize("normed", [False, True])
def test_rotation_norms_and_writing(dtype: torch.dtype, rotary: int, normed: bool) -> None:
    tokens, heads, kv_heads, dim = 6, 4, 2, 16
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    kept = qkv.clone()
    positions = torch.tensor([3, 4, 5, 0, 19, 7], dtype=torch.int32)
    slots = torch.tensor([8, 2, 11, 0, 5, 9])
    angles = torch.rand(20, rotary // 2) * 7
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    k_cache, v_cache = torch.full((2, 12, kv_heads, dim), torch.nan).to(dtype).unbind()
    q_norm, k_norm = (torch.randn(2, dim).to(dtype)).unbind() if normed else (None, None)
    q = ops.rope_write(
        qkv, positions, slots, cos_sin, k_cache, v_cache, heads, kv_heads, dim, q_norm, k_norm, 1e-4
    )
    x = kept.view(tokens, -1, dim)
    want_q, want_k = x[:, :heads].double(), x[:, heads : heads + kv_heads].double()
    if q_norm is not None and k_norm is not None:
        want_q, want_k = exact_norm(want_q, q_norm, 1e-4), exact_norm(want_k, k_norm, 1e-4)
    turn = cos_sin[positions.long()]
    close(q, exact_rotate(want_q, turn))
    close(k_cache[slots], exact_rotate(want_k, turn))
    assert torch.equal(v_cache[slots], x[:, heads + kv_heads :])
    others = [s for s in range(12) if s not in slots.tolist()]
    assert torch.isnan(k_cache[others]).all()
    assert torch.isnan(v_cache[others]).all()


def test_devices_without_kernels_are_named() -> None:
    with pytest.raises(ValueError, match="meta"):
        ops_module.ops_for("meta")
    assert ops_module.ops_for("cpu") is ops
