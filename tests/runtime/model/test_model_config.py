"""config.json and GGUF metadata to one description of a decoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ramet.runtime.model.config import ModelConfig, RopeConfig
from ramet.runtime.protocol.errors import ModelError
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

CONFIGS = Path(__file__).parents[3] / "benchmarks" / "configs"

MINIMAL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}


def read(name: str) -> ModelConfig:
    return ModelConfig.from_hf(json.loads((CONFIGS / name).read_text()))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_the_benchmarks_shapes(path: Path) -> None:
    raw = json.loads(path.read_text())
    if "num_experts" in raw:
        with pytest.raises(ModelError, match=r"Qwen3MoeForCausalLM; known are .*LlamaForCausalLM"):
            ModelConfig.from_hf(raw)
        return
    config = ModelConfig.from_hf(raw)
    assert config.num_layers == raw["num_hidden_layers"]
    assert config.eos_ids


def test_llama_31() -> None:
    config = read("llama-3.1-8b.json")
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 8, 128)
    assert config.rope == RopeConfig(
        theta=500_000.0,
        kind="llama3",
        factor=8.0,
        original_context=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    assert config.attn_scale == 128**-0.5
    assert not config.tie_embeddings and not config.attention_bias and not config.qk_norm


def test_qwen_2_and_3() -> None:
    two, three = read("qwen2.5-0.5b.json"), read("qwen3-0.6b.json")
    assert two.attention_bias and not two.output_bias and not two.qk_norm
    assert three.qk_norm and not three.attention_bias
    assert (two.head_dim, three.head_dim) == (64, 128)
    assert two.window(0) == 0


FAMILIES: list[tuple[str, PretrainedConfig]] = [
    ("LlamaForCausalLM", LlamaConfig()),
    ("MistralForCausalLM", MistralConfig()),
    ("Qwen2ForCausalLM", Qwen2Config()),
    ("Qwen3ForCausalLM", Qwen3Config()),
    ("Gemma3ForCausalLM", Gemma3TextConfig()),
]


@pytest.mark.parametrize(("name", "theirs"), FAMILIES, ids=[name for name, _ in FAMILIES])
def test_defaults_and_spellings_are_those_of_transformers(
    name: str, theirs: PretrainedConfig
) -> None:
    """Once as transformers writes a file today, once with all that has a default left out."""
    full = {**theirs.to_dict(), "architectures": [name]}
    bare = {key: value for key, value in full.items() if key in MINIMAL}
    for raw in (full, bare):
        config = ModelConfig.from_hf(json.loads(json.dumps(raw)))
        assert config.rms_eps == theirs.rms_norm_eps
        assert config.context_length == theirs.max_position_embeddings
        assert config.tie_embeddings == theirs.tie_word_embeddings
        if raw is full:
            assert config.num_kv_heads == theirs.num_key_value_heads
            assert (
                config.head_dim == getattr(theirs, "head_dim", None)
                or full["hidden_size"] // (full["num_attention_heads"])
            )
            assert config.eos_ids == ((theirs.eos_token_id,) if theirs.eos_token_id else ())


def test_gemma_3() -> None:
    raw = json.loads(json.dumps({**Gemma3TextConfig(num_hidden_layers=8).to_dict()}))
    raw["architectures"] = ["Gemma3ForCausalLM"]
    config = ModelConfig.from_hf(raw)
    assert config.norm_offset == 1.0 and config.post_norms and config.qk_norm
    assert config.act == "gelu_tanh"
    assert config.embed_scale == raw["hidden_size"] ** 0.5
    assert config.attn_scale == raw["query_pre_attn_scalar"] ** -0.5
    assert [config.window(i) > 0 for i in range(8)] == [True] * 5 + [False] + [True] * 2
    assert config.rope.theta == 1_000_000.0
    assert config.local_rope is not None and config.local_rope.theta == 10_000.0


def test_gemma_3_inside_a_multimodal_config() -> None:
    text = {key: value for key, value in MINIMAL.items() if key != "architectures"}
    text |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window": 1024}
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    config = ModelConfig.from_hf({**raw, "eos_token_id": [1, 106]})
    assert config.architecture == "gemma3"
    assert (config.rope.kind, config.rope.factor) == ("linear", 8.0)
    assert config.local_rope is not None and config.local_rope.kind == "default"
    assert config.eos_ids == (1, 106)


def test_sliding_layers_by_name_and_by_number() -> None:
    types = ["full_attention", "sliding_attention"]
    qwen = {**MINIMAL, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 16}
    assert ModelConfig.from_hf(qwen).window(1) == 0
    qwen |= {"use_sliding_window": True, "max_window_layers": 1}
    assert [ModelConfig.from_hf(qwen).window(i) for i in (0, 1)] == [0, 16]
    mistral = {**MINIMAL, "architectures": ["MistralForCausalLM"], "sliding_window": 8}
    assert [ModelConfig.from_hf(mistral).window(i) for i in (0, 1)] == [8, 8]
    mistral["layer_types"] = types
    assert [ModelConfig.from_hf(mistral).window(i) for i in (0, 1)] == [0, 8]
    with pytest.raises(ModelError, match="layer_types"):
        ModelConfig.from_hf({**mistral, "layer_types": types * 2})


def test_ends_are_gathered_from_both_files() -> None:
    raw = {**MINIMAL, "eos_token_id": 2, "bos_token_id": 1}
    assert ModelConfig.from_hf(raw, {"eos_token_id": [7, 2]}).eos_ids == (2, 7)
    assert ModelConfig.from_hf({**MINIMAL}, {}).eos_ids == ()
    assert ModelConfig.from_hf(raw).bos_id == 1


def test_yarn_and_the_new_spelling() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
    rope |= {"original_max_position_embeddings": 32768, "attention_factor": 0.5}
    config = ModelConfig.from_hf({**MINIMAL, "rope_parameters": rope})
    assert (config.rope.kind, config.rope.theta, config.rope.factor) == ("yarn", 1e6, 4.0)
    assert (config.rope.original_context, config.rope.attention_factor) == (32768, 0.5)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["GPT2LMHeadModel"]}, "unknown architecture GPT2LMHeadModel"),
    ({"architectures": [], "model_type": "bert"}, "unknown architecture bert"),
    ({"hidden_act": "relu"}, "unknown activation 'relu'"),
    ({"vocab_size": None}, "lacks vocab_size"),
    ({"vocab_size": "many"}, "vocab_size in config.json is 'many'"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    ({"rope_scaling": {"rope_type": "longrope"}}, "unknown rope type 'longrope'"),
    ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
    ({"num_hidden_layers": 0}, "num_layers is 0"),
    ({"num_attention_heads": 0}, "num_heads is 0"),
    ({"head_dim": 5}, "head_dim 5"),
    ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantized by awq"),
    ({"head_dim": 0}, "scaled by 1/√0"),
    ({"hidden_size": -64, "head_dim": 16}, "hidden_size is -64"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
def test_nonsense_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_hf({**MINIMAL, **change})
