"""One model stored in several ways gives the same tensors under the same names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from ramet.runtime.model.config import ModelConfig
from ramet.runtime.model.loader.names import expected_tensors
from ramet.runtime.model.loader.weights import load_weights
from ramet.runtime.model.store import ModelFiles, resolve
from ramet.runtime.protocol.errors import ModelError
from safetensors.torch import save_file

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 2, 16, 4, 2, 8, 24, 40
RAW = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": FFN,
}
VALUES = {
    "block_count": LAYERS,
    "context_length": 2048,
    "embedding_length": HIDDEN,
    "feed_forward_length": FFN,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.key_length": HEAD_DIM,
    "attention.layer_norm_rms_epsilon": 1e-6,
}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NAMES = GGUF_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def config_of(architecture: str, **changes: object) -> ModelConfig:
    return ModelConfig.from_hf({**RAW, "architectures": [architecture], **changes})


def random_weights(config: ModelConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=generator)
        for name, shape in expected_tensors(config).items()
    }


def gguf_name(name: str, names: dict[str, str]) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, module = stem.split(".", 3)
        return f"blk.{layer}.{names[module]}.{kind}"
    return f"{names[stem]}.{kind}"


def permuted(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Rows as the converter of llama models orders them: halves of a head interleaved."""
    heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else 0
    if not heads:
        return tensor
    return tensor.view(heads, 2, HEAD_DIM // 2, -1).transpose(1, 2).reshape(tensor.shape)


def save_folder(folder: Path, raw: dict[str, object], *shards: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    for number, shard in enumerate(shards):
        save_file(shard, folder / f"model-{number}.safetensors")
    weight_map = {
        name: f"model-{number}.safetensors" for number, s in enumerate(shards) for name in s
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def load(files: ModelFiles, config: ModelConfig, **options: object) -> dict[str, torch.Tensor]:
    pairs = list(load_weights(files, config, torch.float32, **options))  # type: ignore[arg-type]
    assert len(pairs) == len({name for name, _ in pairs})
    return dict(pairs)


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize(
    ("hf", "architecture"),
    [("LlamaForCausalLM", "llama"), ("Qwen2ForCausalLM", "qwen2"), ("Qwen3ForCausalLM", "qwen3")],
)
def test_gguf(hf: str, architecture: str, write_gguf: Callable[..., Path]) -> None:
    config = config_of(hf)
    weights = random_weights(config)
    order = permuted if architecture == "llama" else (lambda _, tensor: tensor)
    stored = {gguf_name(n, GGUF_NAMES): order(n, t).numpy() for n, t in weights.items()}
    stored["rope_unknown.weight"] = np.zeros(4, np.float32)
    files = resolve(str(write_gguf(architecture, VALUES, stored)))
    read = ModelConfig.load(files)
    assert read.attention_bias == config.attention_bias
    assert read.qk_norm == config.qk_norm
    assert read.rms_eps == 1e-6
    assert expected_tensors(read) == expected_tensors(config)
    assert_same(load(files, read), weights)


def test_gguf_of_gemma_holds_norms_plus_one(write_gguf: Callable[..., Path]) -> None:
    config = config_of("Gemma3ForCausalLM")
    weights = {
        name: torch.full_like(tensor, 0.5) if name.endswith("norm.weight") else tensor
        for name, tensor in random_weights(config).items()
    }
    stored = {
        gguf_name(n, GEMMA_NAMES): (t + 1 if n.endswith("norm.weight") else t).numpy()
        for n, t in weights.items()
    }
    values = {**VALUES, "attention.sliding_window": 4}
    files = resolve(str(write_gguf("gemma3", values, stored)))
    read = ModelConfig.load(files)
    assert read.tie_embeddings and read.post_norms and read.sliding_window == 4
    assert_same(load(files, read), weights)


def test_factors_of_the_rope_come_from_their_tensor(write_gguf: Callable[..., Path]) -> None:
    factors = np.asarray([1, 1, 2, 8], np.float32)
    files = resolve(str(write_gguf("llama", VALUES, {"rope_freqs.weight": factors})))
    with pytest.raises(ModelError, match="vocab_size"):
        ModelConfig.load(files)
    embedding = np.zeros((VOCAB, HIDDEN), np.float32)
    stored = {"rope_freqs.weight": factors, "token_embd.weight": embedding}
    files = resolve(str(write_gguf("llama", VALUES, stored)))
    rope = ModelConfig.load(files).rope
    assert (rope.kind, rope.factors) == ("factors", (1.0, 1.0, 2.0, 8.0))


def test_safetensors_in_shards(tmp_path: Path) -> None:
    config = config_of("LlamaForCausalLM", tie_word_embeddings=True)
    weights = random_weights(config)
    names = list(weights)
    extra = {"lm_head.weight": torch.zeros(VOCAB, HIDDEN)}
    first = {name: weights[name] for name in names[:7]}
    rest = {name: weights[name].to(torch.float32) for name in names[7:]} | extra
    files = resolve(str(save_folder(tmp_path / "m", {}, first, rest)))
    assert_same(load(files, config), weights)


def test_dtype_is_converted(tmp_path: Path) -> None:
    config = config_of("LlamaForCausalLM")
    files = resolve(str(save_folder(tmp_path / "m", {}, random_weights(config))))
    assert {t.dtype for _, t in load_weights(files, config, torch.bfloat16)} == {torch.bfloat16}


def test_a_wrapped_decoder_is_unwrapped(tmp_path: Path) -> None:
    config = config_of("Gemma3ForCausalLM")
    weights = random_weights(config)
    stored = {"language_model." + name: tensor for name, tensor in weights.items()}
    stored["vision_tower.x"] = torch.zeros(3)
    files = resolve(str(save_folder(tmp_path / "m", {}, stored)))
    assert_same(load(files, config), weights)


def test_missing_misshapen_and_broken(tmp_path: Path) -> None:
    config = config_of("LlamaForCausalLM")
    weights = random_weights(config)
    last = "model.layers.1.mlp.down_proj.weight"
    rest = {name: tensor for name, tensor in weights.items() if name != last}
    with pytest.raises(ModelError, match=rf"lacks 1 tensors, such as {last}"):
        load(resolve(str(save_folder(tmp_path / "a", {}, rest))), config)
    odd = {**weights, last: torch.zeros(3, 3)}
    with pytest.raises(ModelError, match=rf"{last} has the shape \[3, 3\]"):
        load(resolve(str(save_folder(tmp_path / "b", {}, odd))), config)
    folder = save_folder(tmp_path / "c", {}, weights)
    file = folder / "model-0.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"model-0\.safetensors"):
        load(resolve(str(folder)), config)


def test_dummy_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    files = resolve(str(tmp_path))
    config = config_of("Gemma3ForCausalLM", hidden_size=64)
    with pytest.raises(ModelError, match="load_format=dummy"):
        load(files, config)
    first = load(files, config, load_format="dummy", seed=5)
    assert {n: tuple(t.shape) for n, t in first.items()} == expected_tensors(config)
    assert_same(load(files, config, load_format="dummy", seed=5), first)
    other = load(files, config, load_format="dummy", seed=6)
    embedding = "model.embed_tokens.weight"
    assert not torch.equal(other[embedding], first[embedding])
    assert abs(first[embedding].std().item() - 0.02) < 0.002
    assert first["model.norm.weight"].abs().max() == 0
    plain = load(files, config_of("LlamaForCausalLM"), load_format="dummy")
    assert plain["model.norm.weight"].min() == 1
