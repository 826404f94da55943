"""The seam between engine and device: a batch goes in, sampled tokens come out, possibly later."""

from __future__ import annotations

from typing import Protocol

import torch

from ..scheduler.batch import IntArray, StepBatch, StepResult
from ..scheduler.segments import SharingCost


class Ticket(Protocol):
    """A step that was launched."""

    def ready(self) -> bool:
        """Whether `result` would return without waiting."""
        ...

    def mask(self, rows: IntArray, of: IntArray) -> None:
        """Sample, where the batch has ``masked`` samples: the allowed tokens of the i-th of those
        are row ``of[i]`` ([M] int32) of ``rows`` [K, ceil(vocab_size / 32)], bit v % 32 of word
        v // 32: the first K of what `Runner.mask_rows` gave last. Once, before `result` and before
        the next launch."""
        ...

    def result(self) -> StepResult:
        """Wait for the step's samples. Raises what the step raised."""
        ...


class Runner(Protocol):
    """Runs steps in the order of their launches. Owns weights, KV memory and the request tables
    (slots, last token, sampling state a row); knows nothing of requests, trees or who waits."""

    asynchronous: bool
    """Whether `launch` returns before the step has run, so that the next one is worth planning."""
    num_slots: int
    """KV slots that may be handed out. Ids run from ``page_size`` up; the first page is scratch."""

    @property
    def prompt_sizes(self) -> tuple[int, ...]:
        """Token counts, ascending, of steps without decodes that are captured; empty: none."""
        ...

    @property
    def sharing(self) -> SharingCost | None:
        """What reading keys once for several rows costs; ``None``: `StepBatch.tree` is not looked
        at."""
        ...

    kv: torch.Tensor
    """[layers, 2, num_slots, KV heads, head dim]"""
    max_rows: int
    context_length: int
    vocab_size: int

    def launch(self, batch: StepBatch) -> Ticket:
        """Start a step. Returns at once where the device is asynchronous."""
        ...

    def mask_rows(self, count: int) -> IntArray:
        """[count, ceil(vocab_size / 32)] for `Ticket.mask`, to be filled; what was there means
        nothing, and the next call may give the same memory."""
        ...

    def close(self) -> None: ...
