"""Random weights, for benchmarks and tests that need a shape and no meaning."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..config import ModelConfig
from .names import expected_tensors

_STD = 0.02


def dummy_weights(
    config: ModelConfig, dtype: torch.dtype, device: str, seed: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of everything the model has, drawn on the device itself.

    Matrices are normal with a deviation of 0.02, biases zero, norms such that they multiply by one.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    one = 1.0 - config.norm_offset
    for name, shape in expected_tensors(config).items():
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if name.endswith("bias"):
            tensor.zero_()
        elif len(shape) == 1:
            tensor.fill_(one)
        else:
            tensor.normal_(0.0, _STD, generator=generator)
        yield name, tensor
