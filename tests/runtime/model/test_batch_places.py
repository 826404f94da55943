"""Where a batch's tokens lie."""

from __future__ import annotations

import numpy as np
from ramet.runtime.model.batch_places import places_of, positions_of, runs_of
from ramet.runtime.scheduler.batch import StepBatch


def batch_of(items: list[tuple[int, int, list[int]]], moves: list | None = None) -> StepBatch:
    """Of (new tokens, length, slots of the new tokens)."""
    q_lens = np.array([n for n, _, _ in items], np.int32)
    slots = np.concatenate([slots for _, _, slots in items]).astype(np.int32)
    none = np.zeros(0, np.int32)
    return StepBatch(
        rows=np.arange(len(items), dtype=np.int32),
        q_lens=q_lens,
        kv_lens=np.array([length for _, length, _ in items], np.int32),
        ids=np.zeros(len(slots), np.int32),
        slots=slots,
        samples=none,
        steps=none,
        moves=moves or [],
    )


def runs(batch: StepBatch) -> list[int]:
    return runs_of(batch, places_of(batch, positions_of(batch)))


def test_only_whole_items_in_consecutive_slots_are_runs() -> None:
    batch = batch_of(
        [
            (1, 9, [30]),
            (4, 4, [16, 17, 18, 19]),
            (4, 4, [20, 21, 23, 24]),
            (3, 8, [40, 41, 42]),
            (1, 1, [50]),
            (3, 3, [62, 61, 60]),
        ]
    )
    assert runs(batch) == [-1, 16, -1, -1, 50, -1]


def test_an_item_that_reads_elsewhere_is_where_it_reads() -> None:
    slots = np.array([80, 81], np.int32)
    batch = batch_of([(4, 4, [16, 17, 82, 83]), (3, 3, [20, 21, 22])], [(0, slots)])
    assert runs(batch) == [80, 20]
    batch.moves = [(0, slots), (1, np.array([90], np.int32))]
    assert runs(batch) == [80, -1]
