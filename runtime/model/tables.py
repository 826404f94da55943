"""What a runner remembers of each request: a row in every table here."""

from __future__ import annotations

import numpy as np
import torch

from ..scheduler.batch import FROM_DEVICE, IntArray, LongArray, NewRow, StepBatch


class RequestTables:
    """Slots and last tokens by row, on the device that computes.

    ``slots`` [R, C] int32: where the KV of each position lies. ``last_tokens`` [R] int32: what the
    row sampled last, for steps that are launched before the host knows it.
    """

    def __init__(
        self, max_rows: int, context_length: int, device: torch.device | str = "cpu"
    ) -> None:
        self.slots = torch.zeros((max_rows, context_length), dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(max_rows, dtype=torch.int32, device=device)

    def add(self, new: NewRow) -> None:
        """Give a row to a request."""
        self.move(new.row, new.slots)
        if len(new.output):
            self.last_tokens[new.row] = int(new.output[-1])

    def move(self, row: int, slots: IntArray) -> None:
        """From now on, the row's leading positions lie in these slots."""
        if len(slots):
            self.slots[row, : len(slots)] = torch.from_numpy(slots.astype(np.int32))

    def extend(self, rows: LongArray, positions: LongArray, slots: torch.Tensor) -> None:
        """Note where the tokens of a step go; three arrays of [T], slots int64 on the device."""
        at = torch.from_numpy(np.stack((rows, positions))).to(slots.device)
        self.slots.index_put_((at[0], at[1]), slots.to(torch.int32))

    def ids(self, batch: StepBatch, rows: LongArray) -> torch.Tensor:
        """[T] int32 input ids of a step, `FROM_DEVICE` replaced; ``rows`` [T] of each token."""
        ids = torch.from_numpy(batch.ids.astype(np.int32)).to(self.slots.device)
        (late,) = np.nonzero(batch.ids == FROM_DEVICE)
        if len(late):
            where = torch.from_numpy(late).to(ids.device)
            of = torch.from_numpy(rows[late]).to(ids.device)
            ids.index_copy_(0, where, self.last_tokens.index_select(0, of))
        return ids

    def sampled(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Remember the tokens [S] that rows [S] int64 sampled."""
        self.last_tokens.index_copy_(0, rows, tokens)
