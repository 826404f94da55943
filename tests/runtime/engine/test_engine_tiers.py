"""Tiers under the engine's loop, over a simulated runner and real sockets."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import zmq
from ramet.runtime.engine.connections import Connections
from ramet.runtime.engine.loop import Engine
from ramet.runtime.memory.block_chain import BlockNames
from ramet.runtime.memory.block_files import BlockFiles
from ramet.runtime.memory.disk_tier import DiskTier
from ramet.runtime.memory.kv_memory import KVMemory
from ramet.runtime.memory.tier_costs import TierCosts
from ramet.runtime.memory.tiers import Tiers
from ramet.runtime.protocol.messages import Abort
from ramet.runtime.scheduler import loading
from ramet.runtime.scheduler.limits import Limits
from ramet.runtime.scheduler.scheduler import Scheduler

VOCAB, SLOTS = 26, 256


class Running:
    """An engine in a thread, and one client of it."""

    def __init__(self, folder, runner, tiers, client) -> None:
        address = f"ipc://{folder}/engine"
        self.tiers = tiers
        self.memory = KVMemory(SLOTS, 16, tiers=tiers)
        limits = Limits(max_rows=4, context_length=256, step_tokens=64)
        self.scheduler = Scheduler(limits, self.memory)
        connections = Connections(address, self.memory.tree)
        self.engine = Engine(runner, self.scheduler, connections, [b"x"] * VOCAB)
        self.thread = threading.Thread(target=self.engine.run, daemon=True)
        self.thread.start()
        self.context = zmq.Context()
        self.client = client(self.context, address)

    def stop(self) -> None:
        self.engine.stop()
        self.thread.join(10)
        assert not self.thread.is_alive()
        self.client.socket.close()
        self.context.term()


@pytest.fixture(params=[False, True], ids=["sync", "overlap"])
def start(request, tmp_path, simulated_runner, slot_transfer, fake_runner, client_class):
    running: list[Running] = []

    def made(looks=0, disk=None) -> Running:
        inner = simulated_runner(SLOTS, 16, 4, 256, VOCAB)
        transfer = slot_transfer(64, looks)
        transfer.kv = inner.kv
        tier = None
        if disk is not None:
            files = BlockFiles(tmp_path / disk, b"m" * 32, b"k" * 32, transfer.block_bytes)
            tier = DiskTier(files, 100 * files.disk_bytes)
        tiers = Tiers(transfer, BlockNames(b"secret"), tier)
        folder = tmp_path / f"socket{len(running)}"
        folder.mkdir()
        runner = fake_runner(inner, request.param, 0.0005)
        running.append(Running(folder, runner, tiers, client_class))
        return running[-1]

    yield made
    for one in running:
        if one.thread.is_alive():
            one.stop()


def prompt(seed: int, size: int = 80) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, size).tolist()


def eventually(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "never so"
        time.sleep(0.01)


@pytest.mark.parametrize("looks", [0, 2])
def test_what_was_evicted_is_cached_again(start, expected, looks):
    one = start(looks)
    for turn in range(2):
        for seed in range(4):
            rid = turn * 10 + seed
            tokens = one.client.run(rid, prompt(seed), 4)
            assert tokens == expected(prompt(seed), 4, VOCAB)
            assert one.client.finished[rid].cached_tokens >= 79 * turn
    info = one.client.ask(1, "info").data
    assert info["tiers"]["host"]["loads"] == 4
    assert info["tiers"]["host"]["hit_tokens"] >= 4 * 78
    assert info["tiers"]["rates"]["compute_tokens_per_s"] > 0
    assert info["requests"]["waiting"] == 0
    one.stop()
    one.scheduler.assert_consistent()
    assert one.tiers._transfer.closed


def test_a_request_that_waits_for_a_load_can_be_aborted(start, expected):
    one = start(looks=200)
    client = one.client
    for seed in range(4):
        client.run(seed, prompt(seed), 4)
    client.submit(10, prompt(0), 4)
    eventually(lambda: len(one.scheduler.loading) == 1)
    client.send(Abort(rids=(10,)))
    client.pump(lambda: 10 in client.finished)
    assert client.finished[10].reason == "abort"
    assert client.ask(2, "flush").data["freed"] > 0
    assert client.ask(3, "info").data["pages"]["free"] == SLOTS
    assert client.run(11, prompt(0), 4) == expected(prompt(0), 4, VOCAB)
    assert client.finished[11].cached_tokens == 0


def test_an_idle_engine_writes_ahead(start, expected):
    """So that a crash loses nothing of what was cached."""
    one = start(disk="cache")
    for seed in range(2):
        one.client.run(seed, prompt(seed), 4)
    eventually(lambda: len(one.tiers.disk) == 10)
    two = start(disk="cache")
    for seed in range(2):
        assert two.client.run(seed, prompt(seed), 4) == expected(prompt(seed), 4, VOCAB)
        assert two.client.finished[seed].cached_tokens == 79


def test_what_is_cached_in_the_end_is_written(start, expected):
    one = start(disk="cache", looks=1)
    one.client.run(1, prompt(1), 4)
    one.stop()
    two = start(disk="cache", looks=1)
    assert two.client.run(1, prompt(1), 4) == expected(prompt(1), 4, VOCAB)
    assert two.client.finished[1].cached_tokens == 79


def test_a_disk_that_does_not_answer_is_not_waited_for(start, expected, monkeypatch):
    monkeypatch.setattr(loading, "SILENT_SECONDS", 0.2)
    one = start(disk="cache")
    for seed in range(3):
        one.client.run(seed, prompt(seed), 4)
    one.stop()
    two = start(disk="cache")
    gate, asked = threading.Event(), []
    read = two.tiers.disk.files.read

    def hanging(name, into):
        asked.append(name)
        gate.wait(20)
        read(name, into)

    monkeypatch.setattr(two.tiers.disk.files, "read", hanging)
    assert two.client.run(1, prompt(0), 4) == expected(prompt(0), 4, VOCAB)
    assert asked and two.client.finished[1].cached_tokens == 0
    before = len(asked)
    began = time.monotonic()
    assert two.client.run(2, prompt(1), 4) == expected(prompt(1), 4, VOCAB)
    assert len(asked) == before and time.monotonic() - began < 0.2, "nothing else was asked for"
    gate.set()
    eventually(lambda: not two.tiers.busy)
    two.tiers.costs = TierCosts()  # what it has learnt is that the disk is slow
    assert two.client.run(3, prompt(2), 4) == expected(prompt(2), 4, VOCAB)
    assert two.client.finished[3].cached_tokens == 79
    two.stop()
    two.scheduler.assert_consistent()


def test_a_flush_says_what_it_could_not_remove_and_the_engine_goes_on(start, expected):
    one = start(disk="cache")
    one.client.run(1, prompt(1), 4)
    eventually(lambda: len(one.tiers.disk) == 5)
    file = next(iter(one.tiers.disk.files.folder.rglob("*.kv")))
    file.unlink()
    file.mkdir()
    answer = one.client.ask(2, "flush")
    assert "not all could be removed" in answer.error.message
    assert one.client.ask(3, "info").data["pages"]["free"] == SLOTS
    assert one.client.run(4, prompt(1), 4) == expected(prompt(1), 4, VOCAB)
    assert one.client.finished[4].cached_tokens == 0
