"""The disk's index and threads: nothing waits, nothing is lost but the oldest."""

from __future__ import annotations

import logging
import os
import threading
import time

import pytest
from ramet.runtime.memory import disk_tier
from ramet.runtime.memory.block_files import BlockFiles
from ramet.runtime.memory.disk_tier import DiskTier, Read, Written

SIZE = 1024


def name(i: int) -> bytes:
    return i.to_bytes(32, "big")


def content(i: int) -> bytes:
    return bytes([i % 251]) * SIZE


@pytest.fixture
def make(tmp_path):
    tiers = []

    def made(limit=8) -> DiskTier:
        files = BlockFiles(tmp_path, b"m" * 32, b"k" * 32, SIZE)
        tiers.append(DiskTier(files, limit * files.disk_bytes))
        return tiers[-1]

    yield made
    for tier in tiers:
        tier.close()


def store(tier: DiskTier, *numbers: int) -> None:
    for i in numbers:
        assert tier.store(name(i), memoryview(content(i)), lambda: None)
        settle(tier)


def settle(tier: DiskTier) -> list[Written | Read]:
    tier.wait(time.monotonic() + 10)
    return tier.poll()


def fetch(tier: DiskTier, i: int) -> bytes | None:
    into = bytearray(SIZE)
    tier.fetch(name(i), memoryview(into))
    (result,) = settle(tier)
    assert result.name == name(i)
    return None if result.failed else bytes(into)


def test_stored_and_fetched_also_after_a_restart(make):
    tier = make()
    store(tier, 1, 2)
    assert name(1) in tier and len(tier) == 2 and not tier.busy
    assert fetch(tier, 2) == content(2)
    again = make()
    assert len(again) == 2
    assert fetch(again, 1) == content(1)


def test_the_oldest_makes_way(make, tmp_path):
    tier = make(limit=3)
    store(tier, 1, 2, 3)
    tier.touch([name(1)])
    store(tier, 4, 5)
    assert [i for i in range(1, 6) if name(i) in tier] == [1, 4, 5]
    assert tier.evicted == 2
    tier.close()
    assert len(list(tmp_path.rglob("*.kv"))) == 3


def test_order_of_use_outlives_a_restart(make, tmp_path):
    tier = make()
    store(tier, 1, 2, 3)
    for age, i in enumerate((2, 3, 1)):
        os.utime(tier.files.path(name(i)), (1000 + age, 1000 + age))
    fetch(tier, 2)  # a use
    again = make(limit=2)
    assert [i for i in (1, 2, 3) if name(i) in again] == [1, 2]


def test_too_much_at_once_is_not_taken_and_nothing_blocks(make, monkeypatch):
    monkeypatch.setattr(disk_tier, "MOST_WRITES", 3)
    tier = make()
    gate = threading.Event()
    began = time.monotonic()
    taken = [tier.store(name(i), memoryview(content(i)), gate.wait) for i in range(6)]
    assert time.monotonic() - began < 1
    assert taken == [True, True, True, False, False, False] and tier.room == 0
    assert tier.has(name(0)) and name(0) not in tier
    assert not tier.store(name(0), memoryview(content(0)), gate.wait)
    gate.set()
    over = sorted(settle(tier), key=lambda result: result.name)
    assert over == [Written(name(0)), Written(name(1)), Written(name(2))]
    assert tier.room == 3


def test_a_damaged_file_is_refused_once_and_removed(make, caplog):
    tier = make()
    store(tier, 1, 2)
    path = tier.files.path(name(1))
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with caplog.at_level(logging.WARNING):
        assert fetch(tier, 1) is None
    assert "not loaded" in caplog.text and str(path) in caplog.text
    assert name(1) not in tier and tier.refused == 1
    store(tier, 1)  # in its place comes a good one
    assert fetch(tier, 1) == content(1)


def test_a_file_that_somebody_removed_is_only_a_miss(make, caplog):
    tier = make()
    store(tier, 1)
    tier.files.remove(name(1))
    assert fetch(tier, 1) is None
    assert name(1) not in tier and not caplog.records


def test_when_nothing_can_be_written_it_rests_for_a_while(make, monkeypatch, caplog):
    tier = make()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tier.files, "write", full)
    assert tier.store(name(1), memoryview(content(1)), lambda: None)
    assert settle(tier) == [Written(name(1), failed=True)]
    assert "No space left" in caplog.text
    assert tier.room == 0 and not tier.store(name(2), memoryview(content(2)), lambda: None)
    monkeypatch.undo()
    tier._paused_until = 0.0
    store(tier, 2)


def test_clear_leaves_no_file(make, tmp_path):
    tier = make(limit=2)
    store(tier, 1, 2, 3)
    assert tier.clear() == 3
    assert len(tier) == 0 and not list(tmp_path.rglob("*.kv"))
    store(tier, 1)
    assert fetch(tier, 1) == content(1)


def test_what_cannot_be_removed_is_said_and_hinders_nothing_else(make, tmp_path, caplog):
    tier = make(limit=3)
    store(tier, 1, 2, 3)
    path = tier.files.path(name(2))
    path.unlink()
    path.mkdir()
    with pytest.raises(OSError, match="1 of 3 files"):
        tier.clear()
    assert len(tier) == 0 and list(tmp_path.rglob("*.kv")) == [path]
    store(tier, 4, 5)
    path = tier.files.path(name(4))
    path.unlink()
    path.mkdir()
    store(tier, 6, 7, 8)  # the oldest, which cannot be removed, is no fault of a write
    assert [i for i in (6, 7, 8) if name(i) in tier] == [6, 7, 8]
    tier.close()
    assert caplog.text.count("not removed") == 1


def test_close_waits_for_its_threads_but_not_for_one_that_is_stuck(make, monkeypatch):
    """A thread that wakes while the interpreter ends would take the process down."""
    tier = make()
    store(tier, 1)
    tier.close()
    assert not any(thread.is_alive() for thread in tier._threads)
    monkeypatch.setattr(disk_tier, "CLOSE_SECONDS", 0.1)
    tier, stuck = make(), threading.Event()
    assert tier.store(name(2), memoryview(content(2)), stuck.wait)
    tier.close()
    assert sum(thread.is_alive() for thread in tier._threads) == 1
    stuck.set()
