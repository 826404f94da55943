"""Uploads in one piece: fields come out as they went in, aligned alike."""

from __future__ import annotations

import numpy as np
import torch
from ramet.runtime.model.staging import Staging, layout


def test_fields_and_pieces_come_out_as_they_went_in():
    staging = Staging(torch.device("cpu"), 64)
    for turn in range(9):  # more turns than the ring has buffers, and larger than it was made for
        short = np.arange(5, dtype=np.int32) + turn
        long = np.arange(40 * (turn + 1), dtype=np.int32)
        one, two, none = staging.upload([short, (long, short), long[:0]])
        assert one.tolist() == short.tolist()
        assert two.tolist() == [*long.tolist(), *short.tolist()]
        assert len(none) == 0


def test_an_upload_into_fixed_memory_follows_the_layout():
    staging = Staging(torch.device("cpu"), 256)
    starts, total = layout([3, 33, 1])
    assert [start % 32 for start in starts] == [0, 0, 0]
    target = torch.full((total + 4,), -1, dtype=torch.int32)
    fields = [np.array(values, np.int32) for values in ([1, 2, 3], range(33), [7])]
    staging.fill(fields, target)
    for start, field in zip(starts, fields):
        assert target[start : start + len(field)].tolist() == field.tolist()
    assert target[total:].tolist() == [-1] * 4


def test_an_upload_is_not_changed_by_the_next():
    staging = Staging(torch.device("cpu"), 64)
    (first,) = staging.upload([np.array([1, 2, 3], np.int32)])
    staging.upload([np.array([9, 9, 9], np.int32)])
    assert first.tolist() == [1, 2, 3]
