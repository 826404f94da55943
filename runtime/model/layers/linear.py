"""Linear layers. Quantized and adapted ones are further holders with the same methods."""

from __future__ import annotations

from typing import Protocol

import torch

from ....kernels.ops import Ops


class Linear(Protocol):
    """A matrix [N, K] with an optional bias [N], in whatever form its device likes best."""

    out_features: int

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """[T, K] to [T, N]."""
        ...


class PlainLinear:
    """The weight as it is, multiplied by the device's own `Ops.linear`."""

    def __init__(self, ops: Ops, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._ops = ops
        self.weight = weight
        self.bias = bias
        self.out_features = weight.shape[0]

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return self._ops.linear(x, self.weight, self.bias)


class PackedLinear:
    """The weight in oneDNN's blocked layout: on the CPU twice as fast as a plain product and more,
    for one row as for many. The plain weight is not kept."""

    # The layout chosen for many rows serves few rows as well; the reverse does not hold.
    ROWS_HINT = 512

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), self.ROWS_HINT)
        self._bias = bias
        self.out_features = weight.shape[0]

    @staticmethod
    def supports(weight: torch.Tensor) -> bool:
        """Whether this torch build and CPU can pack such a weight."""
        mkldnn = torch.ops.mkldnn
        if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return False
        if not (hasattr(mkldnn, "_reorder_linear_weight") and hasattr(mkldnn, "_linear_pointwise")):
            return False
        if weight.dtype == torch.bfloat16:
            return bool(mkldnn._is_mkldnn_bf16_supported())
        return weight.dtype == torch.float32

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")


def make_linear(ops: Ops, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """The fastest holder there is for this weight."""
    if PackedLinear.supports(weight):
        return PackedLinear(weight, bias)
    return PlainLinear(ops, weight.contiguous(), bias)
