"""A model's weights under Hugging Face's names, whatever they are stored in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from ...protocol.errors import ModelError
from ..config import ModelConfig
from ..store import ModelFiles
from .dequantize import dequantize
from .dummy import dummy_weights
from .gguf import GGUFFile
from .names import expected_tensors, hf_name
from .safetensors import read_safetensors

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]


def load_weights(
    files: ModelFiles,
    config: ModelConfig,
    dtype: torch.dtype,
    device: str = "cpu",
    load_format: LoadFormat = "auto",
    *,
    seed: int = 0,
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor of ``dtype`` on ``device``) of every tensor the model needs, each once.

    Names and shapes are checked against the config; what it does not know of (a tied head, buffers)
    is passed over. Raises `ModelError`: nothing to load, a file broken, a tensor missing or of a
    wrong shape.
    """
    wanted = expected_tensors(config)
    for name, tensor in _stored(files, config, dtype, device, load_format, seed):
        shape = wanted.pop(name, None)
        if shape is None:
            continue
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{files.path}: {name} has the shape {list(tensor.shape)}, "
                f"the config says {list(shape)}"
            )
        yield name, tensor.to(device=device, dtype=dtype)
    if wanted:
        some = ", ".join(list(wanted)[:3])
        raise ModelError(f"{files.path} lacks {len(wanted)} tensors, such as {some}")


def _stored(
    files: ModelFiles,
    config: ModelConfig,
    dtype: torch.dtype,
    device: str,
    load_format: LoadFormat,
    seed: int,
) -> Iterator[tuple[str, Tensor]]:
    form = load_format
    if form == "auto":
        form = {"hf": "safetensors", "gguf": "gguf", "config": "none"}[files.kind]
    if form == "dummy":
        return dummy_weights(config, dtype, device, seed)
    if form == "gguf" and files.kind == "gguf":
        return _gguf_weights(files.gguf, config, device)
    paths = files.weight_files() if form == "safetensors" else []
    if paths:
        return read_safetensors(paths, device)
    wanted = "weights" if load_format == "auto" else f"{load_format} weights"
    raise ModelError(f"{files.path} holds no {wanted}; load_format=dummy makes up random ones")


def _gguf_weights(gguf: GGUFFile, config: ModelConfig, device: str) -> Iterator[tuple[str, Tensor]]:
    """The quantized bytes go to the device as they are and are unpacked there."""
    for stored in gguf.tensors.values():
        name = hf_name(stored.name, config.architecture)
        if name is None:
            continue
        raw = torch.from_numpy(gguf.raw(stored.name)).to(device)
        tensor = dequantize(raw, stored.type, stored.shape)
        yield name, _as_trained(name, tensor, config)


def _as_trained(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    """Undo what the conversion to GGUF changed."""
    if config.architecture == "llama" and ".self_attn." in name:
        heads = {"q": config.num_heads, "k": config.num_kv_heads}.get(name.split(".")[4][0])
        if heads:
            return _interleaved_to_halves(tensor, heads)
    if config.norm_offset and name.endswith("norm.weight"):
        return tensor - config.norm_offset
    return tensor


def _interleaved_to_halves(tensor: Tensor, heads: int) -> Tensor:
    """q and k rows of llama GGUFs pair dimension i with i+1; the decoder pairs i with i + half."""
    pairs = tensor.view(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
