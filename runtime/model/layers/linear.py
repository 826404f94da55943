"""Linear layers. Quantized and adapted ones are further holders with the same methods."""

from __future__ import annotations

from typing import Protocol

import torch

from ....kernels.operands import Norm, Rotation
from ....kernels.ops import Activation, Ops


class Linear(Protocol):
    """A matrix [N, K] with an optional bias [N], in whatever form its device likes best; and the
    same with its neighbours, for devices that compute them in one kernel. ``normed`` is the norm of
    x, when whoever made x had it."""

    out_features: int

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """[T, K] to [T, N]."""
        ...

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        """`apply` in the finest dtype that the device gives for nothing."""
        ...

    def of_norm(
        self, x: torch.Tensor, norm: Norm, normed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`apply` of the norm of x."""
        ...

    def rotated_of_norm(
        self, x: torch.Tensor, norm: Norm, rotation: Rotation
    ) -> torch.Tensor | None:
        """Of q, k and v by `of_norm`: `Ops.rope_write`, where one kernel does both; else None, with
        nothing done."""
        ...

    def gated_of_norm(
        self, x: torch.Tensor, norm: Norm, act: Activation, normed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Of `of_norm`, ``act(first half) * second half``: [T, N / 2]."""
        ...

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, norm: Norm | None = None
    ) -> torch.Tensor | None:
        """``residual += apply(x)``, in place. Returns the norm of the residual if it comes for
        nothing."""
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

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        return self.apply(x) if self.bias is not None else self._ops.head(x, self.weight)

    def of_norm(
        self, x: torch.Tensor, norm: Norm, normed: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._ops.norm_linear(
            x, norm.weight, norm.eps, self.weight, self.bias, norm.offset, normed
        )

    def rotated_of_norm(
        self, x: torch.Tensor, norm: Norm, rotation: Rotation
    ) -> torch.Tensor | None:
        return self._ops.norm_rotate(
            x, norm.weight, norm.eps, self.weight, self.bias, norm.offset, rotation
        )

    def gated_of_norm(
        self, x: torch.Tensor, norm: Norm, act: Activation, normed: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self.bias is not None:
            return self._ops.gate(self.of_norm(x, norm, normed), act)
        return self._ops.norm_gate_up(
            x, norm.weight, norm.eps, self.weight, act, norm.offset, normed
        )

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, norm: Norm | None = None
    ) -> torch.Tensor | None:
        return self._ops.linear_add(x, self.weight, residual, self.bias, norm)


class PackedLinear:
    """The weight in oneDNN's blocked layout: on the CPU twice as fast as a plain product and more,
    for one row as for many. The plain weight is not kept."""

    # The layout chosen for many rows serves few rows as well; the reverse does not hold.
    ROWS_HINT = 512

    def __init__(self, ops: Ops, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._ops = ops
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

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        return self.apply(x)

    def of_norm(
        self, x: torch.Tensor, norm: Norm, normed: torch.Tensor | None = None
    ) -> torch.Tensor:
        if normed is None:
            normed = self._ops.rms_norm(x, norm.weight, norm.eps, norm.offset)
        return self.apply(normed)

    def rotated_of_norm(
        self,
        x: torch.Tensor,  # noqa: ARG002 - nothing is done
        norm: Norm,  # noqa: ARG002
        rotation: Rotation,  # noqa: ARG002
    ) -> torch.Tensor | None:
        return None

    def gated_of_norm(
        self, x: torch.Tensor, norm: Norm, act: Activation, normed: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._ops.gate(self.of_norm(x, norm, normed), act)

    def add_to(
        self,
        residual: torch.Tensor,
        x: torch.Tensor,
        norm: Norm | None = None,  # noqa: ARG002 - never comes for nothing here
    ) -> torch.Tensor | None:
        residual += self.apply(x)


def make_linear(ops: Ops, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """The fastest holder there is for this weight."""
    if PackedLinear.supports(weight):
        return PackedLinear(ops, weight, bias)
    return PlainLinear(ops, weight.contiguous(), bias)
