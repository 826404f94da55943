"""How often each token was seen, for the rows whose sampling asks."""

from __future__ import annotations

import numpy as np
import torch

from ...kernels.ops import Ops
from ...kernels.reference.sampling import PROMPT_BIT
from ..protocol.messages import EngineSampling
from ..scheduler.batch import IntArray
from .staging import to_device


class PenaltyCounts:
    """Penalties by row. Only rows that use them hold a line of counts [V], so that many rows with a
    large vocabulary cost nothing."""

    def __init__(
        self, ops: Ops, max_rows: int, vocab_size: int, device: torch.device | str = "cpu"
    ) -> None:
        self.ops = ops
        self.device = torch.device(device)
        self._vocab_size = vocab_size
        self._lines = np.full(max_rows, -1, dtype=np.int64)
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._free: list[int] = []
        self._strengths = np.zeros((3, max_rows), dtype=np.float32)

    def set_row(
        self, row: int, sampling: EngineSampling, prompt: IntArray, output: IntArray
    ) -> bool:
        """Start counting for a row; returns whether it uses any penalty."""
        repetition = sampling.repetition_penalty
        frequency, presence = sampling.frequency_penalty, sampling.presence_penalty
        if repetition == 1.0 and frequency == 0.0 and presence == 0.0:
            if self._lines[row] >= 0:
                self._free.append(int(self._lines[row]))
                self._lines[row] = -1
            return False
        if self._lines[row] < 0:
            self._lines[row] = self._new_line()
        self._strengths[:, row] = (repetition, frequency, presence)
        line = self._counts[int(self._lines[row])]
        line.copy_(to_device(np.bincount(output, minlength=self._vocab_size), self.device))
        if len(prompt):
            line[to_device(np.unique(prompt), self.device).long()] += PROMPT_BIT
        return True

    def _new_line(self) -> int:
        if not self._free:
            have = self._counts.shape[0]
            more = torch.zeros(
                (max(4, have), self._vocab_size), dtype=torch.int32, device=self.device
            )
            self._counts = torch.cat((self._counts, more))
            self._free = list(range(have, self._counts.shape[0]))[::-1]
        return self._free.pop()

    def apply_(self, logits: torch.Tensor, rows: IntArray) -> None:
        """Penalize ``logits`` [S, V] in place, row i as row ``rows[i]`` asks."""
        strengths = to_device(self._strengths[:, rows], self.device)
        index = to_device(self._lines[rows], self.device)
        self.ops.penalize_(logits, index, self._counts, strengths[0], strengths[1], strengths[2])

    def count(self, rows: IntArray, ids: torch.Tensor) -> None:
        """Note that rows [S] sampled ``ids`` [S]."""
        lines = self._lines[rows]
        (at,) = np.nonzero(lines >= 0)
        index = to_device(lines[at], self.device)
        picked = ids.index_select(0, to_device(at, self.device)).long()
        one = torch.ones((), dtype=torch.int32, device=self.device)
        self._counts.index_put_((index, picked), one, accumulate=True)
