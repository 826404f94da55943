"""What is kept of what leaves, for whom there is room, and what loading may cost."""

from __future__ import annotations

import time

import numpy as np
import pytest
from ramet.runtime.memory.block_chain import BLOCK, BlockNames
from ramet.runtime.memory.block_files import BlockFiles
from ramet.runtime.memory.disk_tier import DiskTier
from ramet.runtime.memory.tier_costs import Cost, TierCosts
from ramet.runtime.memory.tiers import Tiers


@pytest.fixture
def make(slot_transfer, tmp_path):
    disks = []

    def made(rows, *, looks=0, disk=None, only_buffer=False) -> Tiers:
        transfer = slot_transfer(rows, looks)
        transfer.kv = np.arange(1024, dtype=np.int64)
        tier = None
        if disk is not None:
            files = BlockFiles(tmp_path, b"m" * 32, b"k" * 32, transfer.block_bytes)
            tier = DiskTier(files, disk * files.disk_bytes)
            disks.append(tier)
        tiers = Tiers(transfer, BlockNames(b"s"), tier, only_buffer=only_buffer)
        tiers.transfer = transfer
        return tiers

    yield made
    for tier in disks:
        tier.close()


def path(first: int, blocks: int):
    names = [bytes([first, at]) * 16 for at in range(blocks)]
    slots = np.arange(blocks * BLOCK, dtype=np.int32).reshape(-1, BLOCK) + first * 64
    return names, slots


def content(tiers, name) -> list[int]:
    return tiers.transfer.rows[tiers.host.row(name)].tolist()


def test_what_is_saved_is_what_the_slots_held(make):
    tiers = make(8)
    names, slots = path(1, 3)
    tiers.save(names, slots)
    tiers.transfer.kv[:] = 0
    assert [content(tiers, name) for name in names] == slots.tolist()


def test_of_a_long_path_the_beginning_is_kept(make):
    tiers = make(3)
    names, slots = path(1, 5)
    tiers.save(names, slots)
    assert set(tiers.host) == set(names[:3])
    assert tiers.counts["host"].dropped_blocks == 2


def test_the_end_of_a_path_goes_before_its_beginning(make):
    tiers = make(4)
    one, slots = path(1, 3)
    tiers.save(one, slots)
    two, more = path(2, 3)
    tiers.save(two, more)
    assert set(tiers.host) == {one[0], *two}


def test_what_is_there_is_used_not_saved_again(make):
    tiers = make(4)
    one, slots = path(1, 2)
    two, more = path(2, 2)
    tiers.save(one, slots)
    tiers.save(two, more)
    saved = tiers.transfer.saved
    tiers.save(one, slots)
    assert tiers.transfer.saved == saved
    tiers.save(*path(3, 2))
    assert one[0] in tiers.host and two[1] not in tiers.host


def test_a_row_that_a_copy_writes_to_is_nobody_elses(make):
    tiers = make(2, looks=10**6, disk=8)
    names, slots = path(1, 2)
    other = b"o" * 32
    tiers.disk.files.write(other, memoryview(bytes(BLOCK * 8)))
    tiers.disk._known[other] = None
    tiers.disk._paused_until = time.monotonic() + 100  # so that it holds no row
    tiers.save(names, slots)
    assert tiers.fetch([other]) is None
    tiers.save(*path(2, 1))
    assert set(tiers.host) == set(names)
    tiers.settle(10)
    assert tiers.fetch([other]) is not None


def test_a_row_that_is_being_written_to_disk_stays(make):
    tiers = make(2, disk=8)
    names, slots = path(1, 2)
    tiers.save(names, slots)  # and to disk, in a thread that nobody has asked yet
    tiers.save(*path(2, 2))
    assert set(tiers.host) == set(names)
    tiers.settle(10)
    tiers.save(*path(3, 2))
    assert not set(tiers.host) & set(names)
    assert all(name in tiers for name in names), "on disk"


def test_a_buffer_does_not_keep_what_is_on_disk(make):
    tiers = make(8, disk=8, only_buffer=True)
    names, slots = path(1, 2)
    tiers.save(names, slots)
    tiers.settle(10)
    tiers.host.clear()
    tiers.save(names, slots)
    assert not tiers.host and all(name in tiers for name in names)


def test_a_fetch_ends_also_when_its_files_are_gone(make):
    tiers = make(8, disk=8)
    names, slots = path(1, 3)
    tiers.save(names, slots)
    tiers.settle(10)
    tiers.host.clear()
    tiers.disk.files.remove(names[1])
    fetch = tiers.fetch(names)
    assert not fetch.over
    deadline = time.monotonic() + 10
    while not fetch.over and time.monotonic() < deadline:
        tiers.poll()
    assert fetch.failed == 1 and set(tiers.host) == {names[0], names[2]}
    assert names[1] not in tiers
    tiers.host.assert_consistent()
    tiers.clear()
    assert tiers.empty and len(tiers.host._free) == 8


def test_what_costs_less_is_done():
    costs = TierCosts()
    assert costs.pays(1, 10**9, 10**9), "nobody knows yet"
    costs.compute.add(1000, 1.0)
    assert costs.pays(1, 10**9, 10**9)
    costs.copy.add(1000, 0.001)
    costs.read.add(1000, 1.0)
    assert costs.pays(100, 50_000, 0)
    assert not costs.pays(100, 200_000, 0)
    assert costs.pays(100, 50_000, 40)
    assert not costs.pays(100, 50_000, 80)


def test_estimates_follow_what_happens():
    costs = TierCosts()
    costs.compute.add(100, 10.0)
    for _ in range(50):
        costs.compute.add(100, 0.1)
    assert costs.compute.of(1000) == pytest.approx(1.0, rel=0.2)
    assert costs.facts()["compute_tokens_per_s"] == pytest.approx(1000, rel=0.2)
    costs.compute.add(0, 1.0)
    costs.compute.add(5, -1.0)
    assert costs.compute.of(1000) == pytest.approx(1.0, rel=0.2)


def test_what_every_piece_costs_is_told_from_what_its_size_does():
    cost = Cost()
    for units in (10, 500, 20, 1000, 100):
        cost.add(units, 0.003 + units * 1e-5)
    assert cost.of(200) == pytest.approx(0.005)
    assert cost.more(200) == pytest.approx(0.002)
    assert cost.per_second == pytest.approx(1e5)
    cost.relent()
    assert cost.of(200) == pytest.approx(0.005 * 0.97)


@pytest.mark.parametrize(
    "measured", [[(10, 1.0), (1000, 0.9)], [(10, 0.0), (20, 1.0)], [(5, 0.5), (5, 0.7)]]
)
def test_measurements_that_make_no_sense_together_give_no_nonsense(measured):
    cost = Cost()
    for units, seconds in measured:
        cost.add(units, seconds)
    assert 0 <= cost.more(10) <= cost.of(10) <= 2.0


def test_a_short_prompt_is_computed_where_steps_cost_the_same_anyhow():
    """As on a GPU: 16 tokens take as long as 64, and a load as long as a step."""
    costs = TierCosts()
    for tokens in (16, 64, 512, 4096):
        costs.compute.add(tokens, 0.003 + tokens * 2e-5)
        costs.copy.add(tokens * 1000, 0.002 + tokens * 1e-6)
    assert not costs.pays(32, 32_000, 0)
    assert costs.pays(4096, 4_096_000, 0)
