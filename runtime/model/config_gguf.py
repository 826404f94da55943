"""A GGUF's metadata to `ModelConfig`."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from ..protocol.errors import ModelError
from .config import ModelConfig, RopeConfig, scale_of
from .loader.gguf import GGUFFile

_KNOWN = ("llama", "qwen2", "qwen3", "gemma3")
_GEMMA_PERIOD = 6
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def read_gguf(gguf: GGUFFile) -> ModelConfig:
    """Raises `ModelError` naming what is unknown or missing."""
    name = gguf.metadata.get("general.architecture")
    values = _Values(gguf.metadata, str(name))
    if name not in _KNOWN:
        raise ModelError(f"unknown GGUF architecture {name}; known are {', '.join(_KNOWN)}")
    if values.integer("expert_count", 0):
        raise ModelError(f"{gguf.path} is a mixture of experts ({name}), which is not known")
    heads = values.integer("attention.head_count")
    hidden = values.integer("embedding_length")
    layers = values.integer("block_count")
    head_dim = values.integer("attention.key_length", hidden // max(heads, 1))
    gemma = name == "gemma3"
    context = values.integer("context_length")
    rope = _rope(gguf, values, head_dim, context)
    window = values.integer("attention.sliding_window", 0) if gemma else 0
    local_theta = values.number("rope.freq_base_swa", 10_000.0)
    has = gguf.tensors.__contains__
    return ModelConfig(
        architecture=name,
        vocab_size=_vocab_size(gguf, values),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=values.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        ffn_size=values.integer("feed_forward_length"),
        rms_eps=values.number("attention.layer_norm_rms_epsilon", 1e-6),
        rope=rope,
        local_rope=RopeConfig(theta=local_theta) if gemma else None,
        context_length=context,
        tie_embeddings=not has("output.weight"),
        attention_bias=has("blk.0.attn_q.bias"),
        output_bias=has("blk.0.attn_output.bias"),
        mlp_bias=has("blk.0.ffn_gate.bias"),
        qk_norm=has("blk.0.attn_q_norm.weight"),
        act="gelu_tanh" if gemma else "silu",
        norm_offset=1.0 if gemma else 0.0,
        embed_scale=float(hidden) ** 0.5 if gemma else 1.0,
        attn_scale=_attn_scale(name, hidden, heads, head_dim, layers),
        post_norms=gemma,
        sliding_window=window,
        sliding_layers=tuple((i + 1) % _GEMMA_PERIOD != 0 for i in range(layers)) if window else (),
        attn_softcap=values.number("attn_logit_softcapping", 0.0),
        final_softcap=values.number("final_logit_softcapping", 0.0),
        eos_ids=_declared(gguf.metadata, _END_KEYS),
        bos_id=next(iter(_declared(gguf.metadata, ("bos_token_id",))), None),
        dtype="bfloat16",
    )


class _Values:
    """Metadata under the architecture's prefix, each value checked for its type."""

    def __init__(self, metadata: dict[str, Any], prefix: str) -> None:
        self.metadata = metadata
        self.prefix = prefix

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.prefix}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"the GGUF lacks {self.prefix}.{key}")
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(f"{self.prefix}.{key} is {value!r}; one whole number is expected")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self.prefix}.{key} is {value!r}; a number is expected")
        # Stored in single precision: 1e-5 must come back as the number that was meant.
        return float(str(np.float32(value)))


def _vocab_size(gguf: GGUFFile, values: _Values) -> int:
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is not None and len(embedding.shape) == 2:
        return embedding.shape[0]
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    return values.integer("vocab_size", len(tokens) if isinstance(tokens, list) else None)


def _attn_scale(name: str, hidden: int, heads: int, head_dim: int, layers: int) -> float:
    """Gemma 3 of 27B (62 layers) alone divides by another number than the head's size."""
    scalar = hidden / max(heads, 1) if name == "gemma3" and layers == 62 else head_dim
    return scale_of(scalar)


def _rope(gguf: GGUFFile, values: _Values, head_dim: int, context: int) -> RopeConfig:
    theta = values.number("rope.freq_base", 10_000.0)
    partial = values.integer("rope.dimension_count", head_dim) / max(head_dim, 1)
    factors = gguf.tensors.get("rope_freqs.weight")
    if factors is not None and factors.type == "F32":
        divisors = tuple(float(x) for x in gguf.raw(factors.name).view(np.float32))
        return RopeConfig(theta=theta, kind="factors", factors=divisors, partial_factor=partial)
    kind = values.get("rope.scaling.type") or "none"
    if kind == "none":
        return RopeConfig(theta=theta, partial_factor=partial)
    kinds: dict[str, Literal["linear", "yarn"]] = {"linear": "linear", "yarn": "yarn"}
    if kind not in kinds:
        raise ModelError(f"unknown rope scaling {kind!r} in the GGUF; known are linear, yarn")
    return RopeConfig(
        theta=theta,
        kind=kinds[kind],
        factor=values.number("rope.scaling.factor", 1.0),
        original_context=values.integer("rope.scaling.original_context_length", context),
        partial_factor=partial,
    )


def _declared(metadata: dict[str, Any], keys: tuple[str, ...]) -> tuple[int, ...]:
    ids = [metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int)))
