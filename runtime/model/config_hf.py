"""config.json, in the spellings of transformers 4 and 5, to `ModelConfig`."""

from __future__ import annotations

from typing import Any

from ..protocol.errors import ModelError
from .config import Activation, ModelConfig, RopeConfig, scale_of

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
}
_MODEL_TYPES = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
    "gemma3": "gemma3",
}
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}
# What transformers assumes where the file is silent.
_EPS = {"gemma3": 1e-6, "llama": 1e-6, "mistral": 1e-6, "qwen2": 1e-6, "qwen3": 1e-6}
_THETA = {"gemma3": 1_000_000.0}
_CONTEXT = {"gemma3": 131_072, "llama": 2048, "mistral": 131_072, "qwen2": 32_768, "qwen3": 32_768}
_HEAD_DIM = {"gemma3": 256, "qwen3": 128}
_TIED = {"gemma3": True}


def read_hf(config: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """Raises `ModelError` naming what is unknown or missing."""
    name = _architecture(config)
    _refuse_quantized(config)
    text = _Fields({**config, **(config.get("text_config") or {})})
    heads = text.integer("num_attention_heads")
    hidden = text.integer("hidden_size")
    layers = text.integer("num_hidden_layers")
    head_dim = text.integer("head_dim", _HEAD_DIM.get(name) or hidden // max(heads, 1))
    gemma = name == "gemma3"
    scalar = text.number("query_pre_attn_scalar", 256.0) if gemma else float(head_dim)
    bias = text.flag("attention_bias", name == "qwen2")
    window, sliding = _sliding(name, text, layers)
    full, local = _ropes(name, text)
    return ModelConfig(
        architecture=name,
        vocab_size=text.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=text.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        ffn_size=text.integer("intermediate_size"),
        rms_eps=text.number("rms_norm_eps", _EPS[name]),
        rope=full,
        local_rope=local,
        context_length=text.integer("max_position_embeddings", _CONTEXT[name]),
        tie_embeddings=text.flag("tie_word_embeddings", _TIED.get(name, False)),
        attention_bias=bias,
        output_bias=bias and name != "qwen2",
        mlp_bias=text.flag("mlp_bias", False),
        qk_norm=name in ("qwen3", "gemma3"),
        act=_activation(text),
        norm_offset=1.0 if gemma else 0.0,
        embed_scale=float(hidden) ** 0.5 if gemma else 1.0,
        attn_scale=scale_of(scalar),
        post_norms=gemma,
        sliding_window=window,
        sliding_layers=sliding,
        attn_softcap=text.number("attn_logit_softcapping", 0.0),
        final_softcap=text.number("final_logit_softcapping", 0.0),
        eos_ids=_ids(text.get("eos_token_id"), generation.get("eos_token_id")),
        bos_id=next(iter(_ids(text.get("bos_token_id"), generation.get("bos_token_id"))), None),
        dtype=str(text.get("dtype") or text.get("torch_dtype") or "bfloat16").split(".")[-1],
    )


class _Fields:
    """Values of a config by name, null meaning absent, each checked for its type."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"the model's config.json lacks {key}")
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(f"{key} in config.json is {value!r}; a whole number is expected")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{key} in config.json is {value!r}; a number is expected")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        return default if value is None else bool(value)


def _architecture(config: dict[str, Any]) -> str:
    declared = config.get("architectures") or []
    model_type = config.get("model_type")
    for name in declared:
        if name in _ARCHITECTURES:
            return _ARCHITECTURES[name]
    if not declared and model_type in _MODEL_TYPES:
        return _MODEL_TYPES[model_type]
    shown = ", ".join(declared) or str(model_type)
    known = ", ".join(sorted(_ARCHITECTURES))
    raise ModelError(f"unknown architecture {shown}; known are {known}")


def _refuse_quantized(config: dict[str, Any]) -> None:
    """Packed weights read as plain ones would give noise. ``gguf`` only tells of an origin."""
    quantization = config.get("quantization_config") or {}
    method = quantization.get("quant_method")
    if quantization and method != "gguf":
        raise ModelError(f"the weights are quantized by {method}, which cannot be read yet")


def _activation(text: _Fields) -> Activation:
    name = text.get("hidden_activation") or text.get("hidden_act") or "silu"
    if name not in _ACTIVATIONS:
        raise ModelError(f"unknown activation {name!r}; known are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _sliding(name: str, text: _Fields, layers: int) -> tuple[int, tuple[bool, ...]]:
    window = text.integer("sliding_window", 4096 if name == "gemma3" else 0)
    types = text.get("layer_types")
    if name in ("qwen2", "qwen3") and not text.flag("use_sliding_window", False):
        window = 0
    if not window:
        return 0, ()
    if types is not None:
        if len(types) != layers:
            raise ModelError(f"layer_types names {len(types)} layers; the model has {layers}")
        sliding = tuple(kind == "sliding_attention" for kind in types)
    elif name == "gemma3":
        period = text.integer("sliding_window_pattern", 6)
        sliding = tuple((layer + 1) % period != 0 for layer in range(layers))
    elif name in ("qwen2", "qwen3"):
        first = text.integer("max_window_layers", 28)
        sliding = tuple(layer >= first for layer in range(layers))
    else:
        sliding = (True,) * layers
    return (window, sliding) if any(sliding) else (0, ())


def _ropes(name: str, text: _Fields) -> tuple[RopeConfig, RopeConfig | None]:
    """The rope of full layers, and that of sliding layers where it differs."""
    nested = text.get("rope_parameters") or {}
    partial = text.number("partial_rotary_factor", 1.0)
    if "full_attention" in nested or "sliding_attention" in nested:
        full = _rope(nested.get("full_attention") or {}, _THETA.get(name, 1e4), partial)
        return full, _rope(nested.get("sliding_attention") or {}, 1e4, partial)
    theta = text.number("rope_theta", _THETA.get(name, 10_000.0))
    full = _rope(nested or text.get("rope_scaling") or {}, theta, partial)
    if name != "gemma3":
        return full, None
    local = text.number("rope_local_base_freq", 10_000.0)
    return full, RopeConfig(theta=local, partial_factor=partial)


def _rope(scaling: dict[str, Any], theta: float, partial: float) -> RopeConfig:
    fields = _Fields(scaling)
    kind = fields.get("rope_type") or fields.get("type") or "default"
    theta = fields.number("rope_theta", theta)
    partial = fields.number("partial_rotary_factor", partial)
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ModelError(f"unknown rope type {kind!r}; known are default, linear, llama3, yarn")
    if kind == "default":
        return RopeConfig(theta=theta, partial_factor=partial)
    declared = fields.get("attention_factor")
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=fields.number("factor", 1.0),
        original_context=fields.integer("original_max_position_embeddings", 0),
        low_freq_factor=fields.number("low_freq_factor", 1.0),
        high_freq_factor=fields.number("high_freq_factor", 4.0),
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        attention_factor=None if declared is None else float(declared),
        mscale=fields.number("mscale", 0.0),
        mscale_all_dim=fields.number("mscale_all_dim", 0.0),
        truncate=fields.flag("truncate", True),
        partial_factor=partial,
    )


def _ids(*values: Any) -> tuple[int, ...]:
    """Every id among numbers, lists of numbers and nulls, each once, in order."""
    found: dict[int, None] = {}
    for value in values:
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, int) and not isinstance(item, bool):
                found[item] = None
    return tuple(found)
