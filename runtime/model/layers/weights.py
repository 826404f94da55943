"""Named tensors on their way into layers: each taken once, with its shape checked."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...protocol.errors import ModelError


class Weights:
    """Tensors by their Hugging Face names. Layers take theirs out; what is left is an error."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._tensors = dict(tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Remove and return a tensor. Raises `ModelError` when it is missing or misshapen."""
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise ModelError(f"the weights hold no tensor named {name!r}")
        if tuple(tensor.shape) != shape:
            raise ModelError(f"tensor {name!r} is {list(tensor.shape)}, expected {list(shape)}")
        return tensor

    def rows(self, name: str, least: int, width: int) -> torch.Tensor:
        """Like `take` for a table of ``least`` rows that may be padded with more."""
        have = self._tensors.get(name)
        size = least if have is None or have.dim() != 2 else max(least, have.shape[0])
        return self.take(name, size, width)

    def joined(self, names: list[str], heights: list[int], width: int) -> torch.Tensor:
        """Several matrices [height, width] one below the other, for one product of them all."""
        return torch.cat([self.take(n, h, width) for n, h in zip(names, heights, strict=True)])

    def joined_bias(self, names: list[str], heights: list[int]) -> torch.Tensor:
        """The biases that go with `joined`."""
        return torch.cat([self.take(n, h) for n, h in zip(names, heights, strict=True)])

    def finish(self) -> None:
        """Raise `ModelError` when a tensor of the decoder was not used: the model has a part that
        this code does not know, and its answers would be wrong."""
        left = [n for n in self._tensors if not n.endswith("rotary_emb.inv_freq")]
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise ModelError(f"no layer takes the tensors {', '.join(sorted(left)[:3])}{more}")
