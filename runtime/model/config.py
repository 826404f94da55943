"""What a decoder is made of, read from a config.json or from a GGUF's metadata. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..protocol.errors import ModelError

if TYPE_CHECKING:
    from .loader.gguf import GGUFFile
    from .store import ModelFiles

RopeKind = Literal["default", "linear", "llama3", "yarn", "factors"]
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions of one kind of layer."""

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    """``linear``, ``llama3``, ``yarn``: by how much the context was stretched."""
    original_context: int = 0
    """``llama3``, ``yarn``: the context before it was stretched."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """``yarn``: multiplies cos and sin; None: 0.1 ln(factor) + 1, or by the two below if set."""
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    """``yarn``: whether the bounds of the ramp are rounded to whole dimensions."""
    partial_factor: float = 1.0
    """The share of a head's dimensions that are rotated, from the first on."""
    factors: tuple[float, ...] = ()
    """``factors``: [rotary_dim / 2] divisors of the inverse frequencies; some GGUFs carry them."""


def scale_of(scalar: float) -> float:
    """1/√scalar, what scores are multiplied by. Raises `ModelError` for a scalar that has none."""
    if not scalar > 0:
        raise ModelError(f"attention cannot be scaled by 1/√{scalar:g}")
    return float(scalar) ** -0.5


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only model. Sizes count elements; windows and contexts count tokens."""

    architecture: str
    """``llama``, ``mistral``, ``qwen2``, ``qwen3`` or ``gemma3``."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    rms_eps: float
    rope: RopeConfig
    context_length: int
    tie_embeddings: bool = False
    attention_bias: bool = False
    """q, k and v have biases."""
    output_bias: bool = False
    """o has one too."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """q and k are normed head by head before they are rotated."""
    act: Activation = "silu"
    norm_offset: float = 0.0
    """Norms multiply by (offset + weight)."""
    embed_scale: float = 1.0
    attn_scale: float = 0.0
    """What q·k is multiplied by."""
    post_norms: bool = False
    """Attention and MLP outputs are normed before they join the residual (gemma3's four norms)."""
    sliding_window: int = 0
    """0: none."""
    sliding_layers: tuple[bool, ...] = ()
    """[num_layers] which layers see the window only; these rotate by ``local_rope`` if set."""
    local_rope: RopeConfig | None = None
    attn_softcap: float = 0.0
    final_softcap: float = 0.0
    eos_ids: tuple[int, ...] = ()
    """Every id that any of the model's files declares as an end."""
    bos_id: int | None = None
    dtype: str = "bfloat16"
    """What the checkpoint is stored in, by torch's name."""

    def __post_init__(self) -> None:
        for field in ("vocab_size", "hidden_size", "num_layers", "num_heads", "ffn_size"):
            if getattr(self, field) < 1:
                raise ModelError(f"the model's {field} is {getattr(self, field)}")
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} heads cannot share {self.num_kv_heads} key-value heads"
            )
        if self.head_dim < 2 or self.head_dim % 2 or self.context_length < 1:
            raise ModelError(
                f"head_dim {self.head_dim} or context length {self.context_length} is impossible"
            )

    def window(self, layer: int) -> int:
        """The sliding window of a layer, 0 where it sees everything."""
        return self.sliding_window if self.sliding_layers and self.sliding_layers[layer] else 0

    @classmethod
    def load(cls, files: ModelFiles) -> ModelConfig:
        """From whichever form the model's files have."""
        if files.kind == "gguf":
            return cls.from_gguf(files.gguf)
        return cls.from_hf(files.config(), files.generation_config())

    @classmethod
    def from_hf(
        cls, config: dict[str, Any], generation_config: dict[str, Any] | None = None
    ) -> ModelConfig:
        """From the dict of a config.json. Raises `ModelError` naming what is unknown or missing."""
        from .config_hf import read_hf

        return read_hf(config, generation_config or {})

    @classmethod
    def from_gguf(cls, gguf: GGUFFile) -> ModelConfig:
        """From a parsed GGUF: its metadata, and which tensors it has."""
        from .config_gguf import read_gguf

        return read_gguf(gguf)
