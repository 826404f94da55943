"""Masks of a step on their way to the device: filled in pinned memory, copied once."""

from __future__ import annotations

import numpy as np
import torch

from ...kernels.operands import Masks
from ..scheduler.batch import IntArray, LongArray

_DEPTH = 2
"""Buffers: one may still be read by a copy while the next is filled."""


class MaskRows:
    """Pinned rows [max_rows, ceil(V / 32)] int32, made at first use: most engines never mask."""

    def __init__(self, device: torch.device, max_rows: int, vocab_size: int) -> None:
        self._device = device
        self._shape = (max_rows, -(-vocab_size // 32))
        self._buffers: list[torch.Tensor] = []
        self._events: list[torch.cuda.Event | None] = [None] * _DEPTH
        self._at = 0

    def rows(self, count: int) -> IntArray:
        """[count, ceil(V / 32)] to be filled; waits for the copy that last used this memory."""
        pinned = self._device.type == "cuda"
        while len(self._buffers) < _DEPTH:
            self._buffers.append(torch.empty(self._shape, dtype=torch.int32, pin_memory=pinned))
        self._at = (self._at + 1) % _DEPTH
        event = self._events[self._at]
        if event is not None:
            event.synchronize()
        return self._buffers[self._at][:count].numpy()

    def upload(self, count: int, masked: LongArray, of: IntArray) -> Masks:
        """The first ``count`` of the rows that `rows` gave last, on the device, for the samples
        ``masked`` [M], each the row ``of`` [M]."""
        rows = self._buffers[self._at][:count].to(self._device, non_blocking=True)
        places = torch.from_numpy(np.stack((masked.astype(np.int32), of)))
        if self._device.type == "cuda":
            places = places.pin_memory().to(self._device, non_blocking=True)
            event = self._events[self._at] or torch.cuda.Event()
            event.record()
            self._events[self._at] = event
        return Masks(rows, places[0], places[1])
