"""Host arrays onto the device without a wait: pinned memory, copied in the stream's order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..scheduler.batch import IntArray

_ALIGNED = 32
"""Elements: 128 bytes."""
_DEPTH = 4
"""Uploads that may be under way: a step in flight, the next, and both their requests' tables."""


class Staging:
    """A ring of pinned buffers. An upload returns int32 views on the device, one for each field.

    A buffer is used again only when the copy out of it has run; that is the one place that could
    wait for the device, and with as many buffers as steps can be in flight it does not.
    """

    def __init__(self, device: torch.device, capacity: int) -> None:
        self._device = device
        self._make(capacity)

    def _make(self, capacity: int) -> None:
        pinned = self._device.type == "cuda"
        self._capacity = capacity
        self._buffers = [
            torch.empty(capacity, dtype=torch.int32, pin_memory=pinned) for _ in range(_DEPTH)
        ]
        self._views: list[IntArray] = [buffer.numpy() for buffer in self._buffers]
        self._events: list[torch.cuda.Event | None] = [None] * _DEPTH
        self._next = 0

    def upload(self, fields: Sequence[IntArray | Sequence[IntArray]]) -> list[torch.Tensor]:
        """Copy the fields to the device, each at the next aligned place. A field may come in
        pieces."""
        starts, sizes, target = self._copy(fields, None)
        return [target[begin : begin + size] for begin, size in zip(starts, sizes)]

    def fill(self, fields: Sequence[IntArray | Sequence[IntArray]], into: torch.Tensor) -> None:
        """`upload` to the start of a captured step's fixed inputs (int32 [N]), of which it has
        views already: to make one of a tensor costs more than to write its field."""
        self._copy(fields, into)

    def _copy(
        self, fields: Sequence[IntArray | Sequence[IntArray]], into: torch.Tensor | None
    ) -> tuple[list[int], list[int], torch.Tensor]:
        pieces = [[field] if isinstance(field, np.ndarray) else field for field in fields]
        sizes = [sum(map(len, parts)) for parts in pieces]
        starts, total = layout(sizes)
        if total > self._capacity:
            if self._device.type == "cuda":
                torch.cuda.current_stream().synchronize()  # rare: outgrown, so start a new ring
            self._make(max(total, 2 * self._capacity))
        at = self._next
        self._next = (at + 1) % _DEPTH
        event = self._events[at]
        if event is not None:
            event.synchronize()
        view = self._views[at]
        for begin, parts in zip(starts, pieces):
            for part in parts:
                view[begin : begin + len(part)] = part
                begin += len(part)
        target = into
        if target is None:
            target = torch.empty(total, dtype=torch.int32, device=self._device)
        target[:total].copy_(self._buffers[at][:total], non_blocking=True)
        if self._device.type == "cuda":
            event = event or torch.cuda.Event()
            event.record()
            self._events[at] = event
        return starts, sizes, target


def layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where fields of these sizes begin, and how much all take. Every field is aligned alike, or
    kernels would be compiled again for each way in which they are not."""
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += -(-size // _ALIGNED) * _ALIGNED
    return starts, total


def fetch(tensor: torch.Tensor) -> torch.Tensor:
    """A pinned host copy that is filled when the stream gets there; wait on an event before reading
    it."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return host


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy on the device, without waiting for it. For small, rare arrays; steps use `Staging`."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)
