"""Rotary embedding and the write of K and V, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from ramet.kernels.rope import rope_write

POSITIONS, SLOTS = 40, 80


def table(rotary, device):
    angle = torch.arange(POSITIONS)[:, None] * (1e4 ** (-torch.arange(0, rotary, 2) / rotary))
    return torch.cat([angle.cos(), angle.sin()], dim=1).float().to(device)


def exact(qkv, positions, cos_sin, heads, kv_heads, dim, q_norm, k_norm, eps, offset):
    """q, k, v in float64, by the formula."""
    rotary = cos_sin.shape[1]
    q, k, v = (
        part.double().cpu().view(len(qkv), -1, dim)
        for part in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
    )
    cos, sin = cos_sin.double().cpu()[positions.long().cpu()][:, None, :].chunk(2, dim=-1)

    def turn(x, gain):
        if gain is not None:
            gain = gain.double().cpu() + offset
            x = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * gain
        a, b, rest = x.split([rotary // 2, rotary // 2, dim - rotary], dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)

    return turn(q, q_norm), turn(k, k_norm), v


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@settings(max_examples=6, derandomize=True, deadline=None)
@given(
    tokens=st.sampled_from([1, 3, 70]),
    heads=st.sampled_from([(2, 2), (6, 2), (9, 3)]),
    dim=st.sampled_from([(64, 64), (80, 80), (96, 48), (128, 128), (256, 64)]),
    normed=st.booleans(),
)
def test_rope_write(tokens, heads, dim, normed, dtype, device, poisoned, close):
    (heads, kv_heads), (dim, rotary) = heads, dim
    torch.manual_seed(tokens + dim)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=device).to(dtype)
    positions = torch.randint(POSITIONS, (tokens,), dtype=torch.int32, device=device)
    slots = torch.randperm(SLOTS, device=device)[:tokens]
    cos_sin = table(rotary, device)
    norms = [torch.randn(dim, device=device).to(dtype) if normed else None for _ in range(2)]
    k_cache, v_cache = (poisoned(SLOTS, kv_heads, dim, dtype=dtype) for _ in range(2))
    q = poisoned(tokens, heads, dim, dtype=dtype)
    arguments = (heads, kv_heads, dim, *norms, 1e-6, 1.0)
    rope_write(qkv, positions, slots, cos_sin, k_cache, v_cache, *arguments, out=q)
    want = exact(qkv, positions, cos_sin, *arguments)
    close(q, want[0])
    close(k_cache[slots], want[1])
    close(v_cache[slots], want[2])
    untouched = torch.ones(SLOTS, dtype=torch.bool)
    untouched[slots.cpu()] = False
    assert k_cache.cpu()[untouched].isnan().all(), "a slot of another token was written"


def test_negative_slot_writes_nothing(device, poisoned):
    cache = [poisoned(4, 1, 64) for _ in range(2)]
    qkv = torch.randn(1, 3 * 64, device=device)
    position = torch.zeros(1, dtype=torch.int32, device=device)
    slot = torch.full((1,), -1, device=device)
    rope_write(qkv, position, slot, table(64, device), *cache, 1, 1, 64)
    assert cache[0].isnan().all() and cache[1].isnan().all()


def test_float8_cache_holds_scaled_values(device, close):
    cache = [torch.zeros(4, 2, 64, device=device).to(torch.float8_e4m3fn) for _ in range(2)]
    qkv = torch.randn(2, 6 * 64, device=device).to(torch.bfloat16)
    positions = torch.tensor([5, 9], dtype=torch.int32, device=device)
    slots = torch.tensor([1, 3], device=device)
    cos_sin = table(64, device)
    rope_write(qkv, positions, slots, cos_sin, *cache, 2, 2, 64, k_scale=0.5, v_scale=0.25)
    _, k, v = exact(qkv, positions, cos_sin, 2, 2, 64, None, None, 0.0, 0.0)
    close(cache[0].float()[slots] * 0.5, k, 0.05)
    close(cache[1].float()[slots] * 0.25, v, 0.05)


def test_caches_laid_out_differently_are_refused(device):
    with pytest.raises(ValueError, match="caches must be"):
        rope_write(
            torch.zeros(1, 192, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
            table(64, device),
            torch.zeros(4, 1, 64, device=device),
            torch.zeros(5, 1, 64, device=device),
            1,
            1,
            64,
        )
