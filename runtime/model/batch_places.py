"""Where the tokens of a batch stand: their positions, and the slots where their KV is read."""

from __future__ import annotations

import numpy as np

from ..scheduler.batch import IntArray, StepBatch


def positions_of(batch: StepBatch) -> IntArray:
    """[T] position of each token in its request."""
    starts = np.cumsum(batch.q_lens) - batch.q_lens
    first = batch.kv_lens - batch.q_lens - starts
    return (np.arange(batch.num_tokens) + np.repeat(first, batch.q_lens)).astype(np.int32)


def places_of(batch: StepBatch, positions: IntArray) -> IntArray:
    """[T] where the table says that each token's KV lies: its slot, unless an equal token's KV was
    there already, which the row then reads."""
    if not batch.moves:
        return batch.slots
    places = batch.slots.copy()
    token_rows = np.repeat(batch.rows, batch.q_lens)
    for row, slots in batch.moves:
        (mine,) = np.nonzero((token_rows == row) & (positions < len(slots)))
        places[mine] = slots[positions[mine]]
    return places


def runs_of(batch: StepBatch, places: IntArray) -> list[int]:
    """Of each item that is whole in this step, the first of its slots, if they follow one another;
    -1 for all others. ``places`` are `places_of`."""
    ends = np.cumsum(batch.q_lens)
    begins = ends - batch.q_lens
    breaks = np.concatenate(([0], np.cumsum(np.diff(places) != 1)))
    straight = breaks[ends - 1] == breaks[begins]
    whole = (batch.q_lens == batch.kv_lens) & (batch.q_lens > 0)
    return np.where(straight & whole, places[begins], -1).tolist()


def scratch_batch(row: int, q_lens: list[int]) -> StepBatch:
    """Prompts of the scratch row, written to the scratch slot."""
    lens = np.array(q_lens, np.int32)
    zeros = np.zeros(int(lens.sum()), np.int32)
    return StepBatch(
        rows=np.full(len(lens), row, np.int32),
        q_lens=lens,
        kv_lens=lens.copy(),
        ids=zeros,
        slots=zeros.copy(),
        samples=np.empty(0, np.int32),
        steps=np.empty(0, np.int32),
    )
