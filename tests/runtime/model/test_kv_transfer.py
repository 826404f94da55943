"""KV there and back again: every byte, wherever blocks are cut."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ramet.runtime.memory.block_chain import BLOCK
from ramet.runtime.model import kv_transfer
from ramet.runtime.model.kv_transfer import KVTransfer, block_bytes

SLOTS = 256


def make_kv(dtype: torch.dtype) -> torch.Tensor:
    kv = torch.randn(3, 2, SLOTS, 2, 8)
    return kv.to(dtype)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
)
def test_rows_hold_what_slots_held(dtype):
    kv = make_kv(dtype)
    before = kv.float().clone()
    transfer = KVTransfer(kv, 4)
    assert transfer.block_bytes == block_bytes(kv) == 3 * 2 * BLOCK * 2 * 8 * dtype.itemsize
    slots = np.random.default_rng(0).permutation(SLOTS)[: 3 * BLOCK].astype(np.int32)
    copy = transfer.save(slots.reshape(-1, BLOCK), [2, 0, 3])
    assert copy.ready() and copy.seconds >= 0
    kv.zero_()
    transfer.load([2, 0, 3], slots, 0).wait()
    back = kv.float()
    assert torch.equal(back[:, :, slots], before[:, :, slots])
    others = np.setdiff1d(np.arange(SLOTS), slots)
    assert not back[:, :, others].any(), "nothing else was written"


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(0, BLOCK - 1), st.integers(0, BLOCK - 1), st.integers(1, 3))
def test_parts_of_the_first_and_the_last_block(blocks, skip, short, per_piece):
    count = blocks * BLOCK - skip - short
    if count <= 0 or count + skip <= (blocks - 1) * BLOCK:
        return
    chance = np.random.default_rng(blocks * 1000 + skip * 20 + short)
    kv = make_kv(torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_transfer, "PIECE_BYTES", per_piece * block_bytes(kv))
        transfer = KVTransfer(kv, 6)
    rows = chance.permutation(6)[:blocks].tolist()
    source = chance.permutation(SLOTS)[: blocks * BLOCK].astype(np.int32)
    transfer.save(source.reshape(-1, BLOCK), rows)
    wanted = kv[:, :, source][:, :, skip : skip + count].clone()
    before = kv.clone()
    target = chance.permutation(SLOTS)[:count].astype(np.int32)
    transfer.load(rows, target, skip)
    assert torch.equal(kv[:, :, target], wanted)
    others = np.setdiff1d(np.arange(SLOTS), target)
    assert torch.equal(kv[:, :, others], before[:, :, others])


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(9)), st.integers(1, 9), st.integers(1, 4))
def test_rows_in_a_run_are_one_piece(rows, count, per_piece):
    kv = make_kv(torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_transfer, "PIECE_BYTES", per_piece * block_bytes(kv))
        transfer = KVTransfer(kv, 9)
    for row in range(9):
        transfer.row(row)[:] = bytes([row]) * transfer.block_bytes
    for order in (rows[:count], sorted(rows[:count])):
        runs = list(transfer._runs(order))
        seen = [number(block) for _, host in runs for block in host]
        assert seen == list(order)
        assert [at for at, _ in runs] == [0, *np.cumsum([len(host) for _, host in runs])][:-1]
        for (_, one), (_, two) in itertools.pairwise(runs):
            last, first = number(one[-1]), number(two[0])
            assert first != last + 1 or first % per_piece == 0, "two runs that could be one"


def number(block: torch.Tensor) -> int:
    return int(block.flatten().view(torch.uint8)[0])


def test_a_row_is_memory_to_read_and_write():
    kv = make_kv(torch.bfloat16)
    transfer = KVTransfer(kv, 2)
    slots = np.arange(BLOCK, dtype=np.int32)
    transfer.save(slots.reshape(1, -1), [1])
    data = bytes(transfer.row(1))
    assert len(data) == transfer.block_bytes
    transfer.row(0)[:] = data
    wanted = kv[:, :, :BLOCK].clone()
    transfer.load([0], slots + BLOCK, 0)
    assert torch.equal(kv[:, :, BLOCK : 2 * BLOCK], wanted)
    transfer.close()
