"""Captured steps of rows that decode: a ladder of row counts, small ones twice over.

For few rows keys are cut into many parts, and a step that must be able to read a long text has
programs for all of them; where every text is short a step with fewer takes less.
"""

from __future__ import annotations

from ..scheduler.batch import StepBatch
from .graphs import CapturedDecode, Parts

DECODE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448,
                512)  # fmt: skip
FEW = 8
"""Rows, at most, of a step of which there is one for short texts."""
NEAR = 1024
"""Tokens of every such text, at most."""


class DecodeSteps:
    """The ladders of a runner for up to ``largest`` rows of ``context_length`` tokens."""

    def __init__(self, parts: Parts, largest: int, context_length: int) -> None:
        self.sizes = (*(s for s in DECODE_SIZES if s < largest), largest)
        self._any = {s: CapturedDecode(parts, s, context_length) for s in self.sizes}
        # Where results may not depend on the batch, parts are of one length whatever it is.
        same = getattr(parts.decoder.ops, "invariant", False) or context_length <= NEAR
        few = () if same else (s for s in self.sizes if s <= FEW)
        self._near = {s: CapturedDecode(parts, s, NEAR) for s in few}

    def __len__(self) -> int:
        return len(self._any) + len(self._near)

    def capture(self) -> None:
        """Record all steps, large ones first: the smaller find the pool's memory there."""
        for ladder in (self._any, self._near):
            for step in reversed(ladder.values()):
                step.capture()

    def step_for(self, batch: StepBatch) -> CapturedDecode | None:
        """The smallest step that holds a batch of rows that decode; ``None`` if none does."""
        count = len(batch.rows)
        if count <= FEW and batch.kv_lens.max(initial=0) <= NEAR:
            for size, step in self._near.items():
                if size >= count:
                    return step
        return next((step for size, step in self._any.items() if size >= count), None)
