"""Mends for Triton's interpreter, so that kernels can be tested where there is no GPU.

The interpreter keeps bfloat16 and float8 values as raw bits in unsigned numpy arrays. Products and
sums of those bits, and its own conversions from float32, are wrong. Here every arithmetic operation
on such a type is done in float32 and rounded back to nearest even by torch, as the hardware does.
Nothing else is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

Handle = interpreter.TensorHandle
Builder = interpreter.InterpreterBuilder

NARROW: dict[Any, tuple[torch.dtype, torch.dtype]] = {
    tl.bfloat16: (torch.bfloat16, torch.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
    tl.float8e5: (torch.float8_e5m2, torch.uint8),
}
"""Triton's type -> (torch's type, the type of its bits)."""


def is_narrow(handle: Any) -> bool:
    return handle.dtype.scalar in NARROW


def widen(handle: Any) -> Any:
    """The same values as float32; other types pass through."""
    if not is_narrow(handle):
        return handle
    kind, _ = NARROW[handle.dtype.scalar]
    bits = torch.from_numpy(np.array(handle.data, order="C"))
    return Handle(bits.view(kind).float().numpy(), tl.float32)


def narrow(values: np.ndarray, dtype: Any) -> Any:
    """Round float32 values to a narrow type and keep the bits."""
    kind, bits = NARROW[dtype]
    rounded = torch.from_numpy(np.array(values, dtype=np.float32, order="C")).to(kind)
    return Handle(rounded.view(bits).numpy(), dtype)


def convert(handle: Any, dtype: Any, otherwise: Callable[[], Any]) -> Any:
    target = dtype.scalar
    if not (is_narrow(handle) or target in NARROW):
        return otherwise()
    if not (handle.dtype.scalar.is_floating() and target.is_floating()):
        if is_narrow(handle):
            return Handle(widen(handle).data.astype(interpreter._get_np_dtype(target)), target)
        return narrow(handle.data.astype(np.float32), target)
    wide = widen(handle).data
    if target in NARROW:
        return narrow(wide, target)
    return Handle(wide.astype(interpreter._get_np_dtype(target)), target)


def mend() -> None:
    """Patch the interpreter of this process. Calling it again changes nothing."""
    if getattr(Builder, "_mended", False):
        return
    Builder._mended = True
    plain = {
        name: getattr(Builder, name)
        for name in ("binary_op", "unary_op", "create_dot", "cast_impl", "create_fp_to_fp")
    }

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        kinds = [h.dtype.scalar for h in (lhs, rhs) if is_narrow(h)]
        result = plain["binary_op"](self, widen(lhs), widen(rhs), op)
        if result.data.dtype == np.bool_:
            # A comparison keeps its operands' type, and a scalar one is then spread as floats.
            return Handle(result.data, tl.int1)
        if not kinds:
            return result
        return narrow(result.data, kinds[0])

    def unary_op(self: Any, arg: Any, op: Any) -> Any:
        result = plain["unary_op"](self, widen(arg), op)
        return narrow(result.data, arg.dtype.scalar) if is_narrow(arg) else result

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        # numpy's float16 product rounds every partial sum; the tensor core sums in float32.
        left, right = widen(a).data, widen(b).data
        if left.dtype == np.float16:
            left, right = left.astype(np.float32), right.astype(np.float32)
        if left.dtype != np.float32:
            return plain["create_dot"](self, a, b, d, *rest)
        return Handle((np.matmul(left, right) + d.data).astype(d.data.dtype), d.dtype.scalar)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        return convert(src, dst_type, lambda: plain["cast_impl"](self, src, dst_type))

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, mode: Any) -> Any:
        return convert(src, dst_type, lambda: plain["create_fp_to_fp"](self, src, dst_type, mode))

    for function in (binary_op, unary_op, create_dot, cast_impl, create_fp_to_fp):
        setattr(Builder, function.__name__, function)
    # These were bound to the old cast when the class was made.
    for name in ("create_fp_ext", "create_fp_trunc"):
        setattr(Builder, name, lambda self, src, dst_type: self.cast_impl(src, dst_type))
