"""Who may spin, and for how long."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from ramet.runtime.protocol import awake
from ramet.runtime.protocol.awake import SPIN_SECONDS, STEADY_SECONDS, Awake, Patience


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(at=100.0)
    monkeypatch.setattr(awake, "time", SimpleNamespace(monotonic=lambda: now.at))
    return now


@pytest.fixture
def machine(monkeypatch):
    """Makes a machine of so many cores whose files say so."""

    def make(cores: int, files: dict[str, str]) -> float:
        monkeypatch.setattr(awake.os, "sched_getaffinity", lambda _: set(range(cores)))
        monkeypatch.setattr(awake, "_words", lambda path: files.get(path, "").split())
        awake.spin_seconds.cache_clear()
        return awake.spin_seconds()

    yield make
    awake.spin_seconds.cache_clear()


V1 = awake._QUOTA_V1


@pytest.mark.parametrize(
    ("cores", "files", "spins"),
    [
        (2, {}, False),
        (7, {}, False),
        (8, {}, True),
        (64, {"/sys/fs/cgroup/cpu.max": "max 100000"}, True),
        (64, {"/sys/fs/cgroup/cpu.max": "200000 100000"}, False),
        (64, {"/sys/fs/cgroup/cpu.max": "1600000 100000"}, True),
        (64, {V1[0]: "-1", V1[1]: "100000"}, True),
        (64, {V1[0]: "400000", V1[1]: "100000"}, False),
        (64, {V1[0]: "800000"}, True),
    ],
)
def test_only_where_there_are_cores_to_spare(machine, cores, files, spins):
    assert machine(cores, files) == (SPIN_SECONDS if spins else 0.0)


def test_a_message_by_itself_is_worth_little_patience(clock):
    patience = Patience(0.005)
    assert patience.until < clock.at
    patience.heard()
    assert patience.until == clock.at + 0.005
    clock.at += STEADY_SECONDS * 1.5
    patience.heard()
    assert patience.until == clock.at + 0.005


def test_steady_messages_are_worth_more(clock):
    patience = Patience(0.005)
    for _ in range(3):
        patience.heard()
        clock.at += STEADY_SECONDS / 2
    assert patience.until == pytest.approx(clock.at + STEADY_SECONDS / 2)


def test_none_at_all_where_there_shall_be_none(clock):
    patience = Patience(0.0)
    for _ in range(3):
        patience.heard()
        clock.at += 0.001
    assert patience.until < clock.at


async def test_the_loop_sleeps_again():
    loop = asyncio.get_running_loop()
    turns = 0

    def count() -> None:
        nonlocal turns
        turns += 1

    keeps = Awake(0.02)
    turn, original = keeps._turn, loop.call_soon
    keeps._turn = lambda: (count(), turn())  # type: ignore[method-assign]
    keeps.touch()
    keeps.touch()  # not twice
    await asyncio.sleep(0.1)
    spun = turns
    assert spun > 10
    await asyncio.sleep(0.05)
    assert turns == spun
    keeps.touch()
    await asyncio.sleep(0.01)
    assert turns > spun
    assert loop.call_soon == original


async def test_it_does_not_spin_where_it_may_not():
    loop = asyncio.get_running_loop()
    Awake(0.0).touch()
    assert not loop._ready  # type: ignore[attr-defined]
