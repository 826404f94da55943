"""What KV depends on, in 32 bytes: another model, dtype or layout has another fingerprint."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from ..config import EngineConfig
from .config import ModelConfig
from .store import ModelFiles

WHOLE_BYTES = 64 << 20
"""Files up to this size are read whole."""
SAMPLES, SAMPLE_BYTES = 64, 64 << 10
"""Of larger ones so many places are, and their time of change counts too."""
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin")


def fingerprint(
    config: EngineConfig,
    files: ModelFiles,
    model: ModelConfig,
    kv: torch.Tensor,
    dtype: torch.dtype,
) -> bytes:
    """Of the weights in ``files`` as they are computed with. Kernels are only told apart where the
    same bits were promised: elsewhere their results are as good as each other's."""
    told = hashlib.blake2b(digest_size=32, person=b"ramet-kv-model")
    layers, pair, _, heads, dim = kv.shape
    exact = config.enable_deterministic_inference
    facts = [
        repr(model), str(dtype), str(kv.dtype), repr((layers, pair, heads, dim)),
        str(kv.device.type) if exact else "", config.load_format,
    ]  # fmt: skip
    if config.load_format == "dummy" or files.kind == "config":
        facts.append(str(config.random_seed or 0))
    told.update(repr(facts).encode())
    for path in weight_files(files):
        told.update(path.name.encode() + b"\0")
        _sample(told, path)
    return told.digest()


def weight_files(files: ModelFiles) -> list[Path]:
    """Whatever weights may be read from."""
    if files.gguf_path is not None:
        return [files.gguf_path]
    if files.folder is None:
        return []
    return sorted({path for pattern in _WEIGHTS for path in files.folder.glob(pattern)})


def _sample(told: hashlib.blake2b, path: Path) -> None:
    size = path.stat().st_size
    told.update(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        if size <= WHOLE_BYTES:
            told.update(file.read())
            return
        told.update(path.stat().st_mtime_ns.to_bytes(8, "little"))
        for at in range(SAMPLES):
            file.seek((size - SAMPLE_BYTES) * at // (SAMPLES - 1))
            told.update(file.read(SAMPLE_BYTES))
