"""What every kernel's launcher needs to know of the device and of Triton."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def wait_previous(PDL: tl.constexpr):
    """The first half of `after_previous`: wait until the kernel before has ended."""
    if PDL:
        cuda.gdc_wait()


@triton.jit
def release_next(PDL: tl.constexpr):
    """The second half, for where the next kernel had better not start at once: what it asks of a
    multiprocessor would be missed."""
    if PDL:
        cuda.gdc_launch_dependents()


@triton.jit
def after_previous(PDL: tl.constexpr):
    """Under programmatic dependent launch: wait until the kernel before has ended, then let the
    next one start.

    Every kernel calls it once, waiting before it lets the next one go. So what was written two
    kernels ago or earlier (weights, tables, the KV of earlier steps) may be read before the call;
    what the kernel right before wrote may not, and nothing may be written before it.
    """
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit
def fetch_lines(lines, SIZE: tl.constexpr):
    """Ask for the first SIZE bytes (a multiple of 16) at each pointer to be brought into the
    second-level cache. Returns at once; nothing depends on it. For Hopper, compiled."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [lines.to(tl.int64), tl.full(lines.shape, SIZE, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def interpreted() -> bool:
    """Whether kernels run under Triton's interpreter (no GPU, no inline assembly)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _properties(index: int) -> tuple[int, tuple[int, int]]:
    properties = torch.cuda.get_device_properties(index)
    return properties.multi_processor_count, (properties.major, properties.minor)


def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of the device; 132 (an H200's) where there is none."""
    return _properties(device.index or 0)[0] if device.type == "cuda" else 132


def dependent_launch(device: torch.device, wanted: bool) -> bool:
    """Whether programmatic dependent launch may be used: wanted, Hopper or later, compiled."""
    if not wanted or device.type != "cuda" or interpreted():
        return False
    return _properties(device.index or 0)[1] >= (9, 0)


def start(
    kernel: Any,
    grid: tuple[int, ...],
    *arguments: Any,
    device: torch.device,
    pdl: bool = False,
    warps: int = 4,
    stages: int = 3,
    **constants: Any,
) -> None:
    """Launch a kernel that has a `PDL` constant, with dependent launch where the device has it."""
    pdl = dependent_launch(device, pdl)
    kernel[grid](
        *arguments,
        **constants,
        PDL=pdl,
        num_warps=warps,
        num_stages=stages,
        launch_pdl=pdl,
    )


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def require(condition: bool, message: str) -> None:
    """Raise ValueError with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)
