"""safetensors files, mapped: tensors as they are stored, shard after shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...protocol.errors import ModelError

_WRAPPERS = ("language_model.model.", "model.language_model.")


def read_safetensors(paths: Sequence[Path], device: str) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every file, on ``device``, in the stored dtype. Raises `ModelError`.

    The decoder of a model that wraps one (with a vision tower, say) comes under its plain names.
    """
    for path in paths:
        try:
            with safe_open(path, framework="pt", device=device) as file:
                for name in file.keys():  # noqa: SIM118 (a handle, not a dict)
                    yield _plain_name(name), file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot read {path}: {error}") from None


def _plain_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        if name.startswith(wrapper):
            return "model." + name.removeprefix(wrapper)
    return name.removeprefix("language_model.") if name.startswith("language_model.lm_") else name
