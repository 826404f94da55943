"""Rope tables equal transformers' for every kind of scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ramet.runtime.model.config import ModelConfig, RopeConfig
from ramet.runtime.model.layers.rope import rope_table

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {**YARN, "rope_theta": 10_000.0},
    "yarn-betas": {**YARN, "rope_theta": 10_000.0, "beta_fast": 20.0, "beta_slow": 2.0},
    "yarn-scaled": {**YARN, "rope_theta": 10_000.0, "attention_factor": 0.7},
    "yarn-mscale": {**YARN, "rope_theta": 10_000.0, "mscale": 0.7, "mscale_all_dim": 1.1},
    "yarn-exact": {**YARN, "rope_theta": 10_000.0, "truncate": False},
}


@pytest.mark.parametrize("kind", KINDS)
def test_equals_transformers(kind: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = LlamaConfig(
        hidden_size=128,
        num_attention_heads=4,
        head_dim=32,
        max_position_embeddings=256,
        rope_parameters=KINDS[kind],
    )
    raw = {**theirs.to_dict(), "architectures": ["LlamaForCausalLM"]}
    ours = ModelConfig.from_hf(raw)
    positions = torch.arange(256)
    cos, sin = LlamaRotaryEmbedding(theirs)(torch.zeros(1), positions.unsqueeze(0))
    half = cos.shape[-1] // 2
    table = rope_table(ours.rope, ours.head_dim, 256)
    assert table.shape == (256, 2 * half)
    assert torch.allclose(table[:, :half], cos[0, :, :half], atol=1e-6)
    assert torch.allclose(table[:, half:], sin[0, :, :half], atol=1e-6)


def test_partial_tables_are_those_of_a_smaller_head() -> None:
    partial = rope_table(RopeConfig(theta=700.0, partial_factor=0.25), 64, 50)
    assert torch.equal(partial, rope_table(RopeConfig(theta=700.0), 16, 50))


def test_given_factors_divide_frequencies() -> None:
    table = rope_table(RopeConfig(theta=100.0, kind="factors", factors=(1.0, 4.0)), 4, 9)
    angles = torch.arange(9.0).unsqueeze(1) * torch.tensor([1.0, 100.0**-0.5 / 4])
    assert torch.allclose(table, torch.cat((angles.cos(), angles.sin()), -1))
