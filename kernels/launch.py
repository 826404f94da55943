"""What every kernel's launcher needs to know of the device and of Triton."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

HALFWAY, EARLY = 1, 2
"""When a kernel under programmatic dependent launch lets the next one start: as soon as it has what
the kernel before made, or at once, so that the next one's weights are on their way meanwhile."""


@triton.jit
def after_previous(PDL: tl.constexpr):
    """Under programmatic dependent launch: let the next kernel start, and wait until the one before
    has ended. PDL says in which order, `HALFWAY` or `EARLY`; 0: neither.

    Every kernel calls it once. A kernel may be early, and then the next but one may begin while the
    one before it still runs. So before the call only what was there when the step's embedding began
    may be read (weights, tables, lengths, the KV of earlier steps), and nothing be written. The
    embedding itself is not early.
    """
    if PDL == 2:
        cuda.gdc_launch_dependents()
    if PDL > 0:
        cuda.gdc_wait()
    if PDL == 1:
        cuda.gdc_launch_dependents()


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
    release: int = HALFWAY,
    warps: int = 4,
    stages: int = 3,
    **constants: Any,
) -> None:
    """Launch a kernel that has a `PDL` constant, with dependent launch where the device has it;
    `release` says when it lets the next one start."""
    pdl = dependent_launch(device, pdl)
    kernel[grid](
        *arguments,
        **constants,
        PDL=release if pdl else 0,
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
