"""Requests whose KV comes from host memory or disk, over a runner that knows what every slot must
hold."""

from __future__ import annotations

import random
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ramet.runtime.memory.block_chain import BLOCK, BlockNames
from ramet.runtime.memory.block_files import BlockFiles
from ramet.runtime.memory.disk_tier import DiskTier
from ramet.runtime.memory.tiers import Tiers


@pytest.fixture
def make(make_world, slot_transfer, tmp_path):
    """A world with tiers below it. ``looks``: how often a copy is looked at before it is over."""
    disks = []

    def made(
        *, rows=64, looks=0, disk=None, only_buffer=False, folder="cache", stamp=b"m" * 32, **world
    ):
        transfer = slot_transfer(rows, looks)
        tier = None
        if disk is not None:
            files = BlockFiles(tmp_path / folder, stamp, b"k" * 32, transfer.block_bytes)
            tier = DiskTier(files, disk * files.disk_bytes)
            disks.append(tier)
        tiers = Tiers(transfer, BlockNames(b"secret"), tier, only_buffer=only_buffer)
        made_world = make_world(tiers=tiers, **world)
        transfer.kv = made_world.runner.kv
        made_world.transfer, made_world.tiers = transfer, tiers
        return made_world

    yield made
    for tier in disks:
        tier.close()


def prompt(first: int, size: int = 80) -> list[int]:
    return [first * 1000 + i for i in range(size)]


def ask(world, rid: int, tokens, new: int = 4, namespace: bytes = b"", **sampling):
    request = world.add(rid, tokens, new, **sampling)
    if namespace:
        request.namespace = namespace
    run(world)
    world.check(rid, tokens, new)
    world.tiers.host.assert_consistent()
    return request


def run(world) -> None:
    """Also while only disks work."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if not world.step() and world.scheduler.idle:
            return
        if not world.scheduler.rows.running:
            time.sleep(0.0002)
    raise AssertionError("never became idle")


def rest(world) -> None:
    """Until everything is written."""
    deadline = time.monotonic() + 20
    while world.memory.spilling.behind or world.tiers.busy:
        assert time.monotonic() < deadline
        world.memory.spilling.rest()
        world.tiers.poll()
        world.scheduler.assert_consistent()


@pytest.mark.parametrize("looks", [0, 1, 7])
def test_what_was_evicted_comes_back(make, looks):
    world = make(slots=256, looks=looks)
    for i in range(4):
        assert ask(world, i, prompt(i)).cached_tokens == 0
    computed = world.runner.computed
    for i in range(4):
        request = ask(world, 10 + i, prompt(i))
        assert request.cached_tokens == 79
    assert world.runner.computed - computed < 4 * (16 + 4 + 1)
    host = world.tiers.counts["host"]
    assert host.loads == 4 and host.hit_tokens == 4 * 79
    assert host.loaded_bytes == 4 * 5 * BLOCK * 8
    assert host.dropped_blocks == 0


def test_without_room_below_nothing_comes_back_and_nothing_is_wrong(make):
    world = make(slots=128, rows=2)
    for turn in range(3):
        for i in range(4):
            ask(world, turn * 10 + i, prompt(i))


@pytest.mark.parametrize("looks", [0, 3])
def test_the_last_block_is_loaded_as_far_as_it_may_be_reused(make, looks):
    world = make(slots=128, looks=looks)
    ask(world, 1, prompt(1, 96), new=1)
    ask(world, 2, prompt(2, 96), new=1)
    assert ask(world, 3, prompt(1, 96), new=1).cached_tokens == 95
    # A part of a block is in the tree: only the rest of it is loaded.
    world.memory.flush()
    ask(world, 4, prompt(3, 90), new=1)
    ask(world, 5, prompt(4, 90), new=1)
    ask(world, 6, [*prompt(3, 20), 7, 7, 7], new=1)
    ask(world, 7, prompt(3, 90), new=1)


def test_others_go_on_while_one_loads(make):
    world = make(slots=512, looks=25)
    ask(world, 1, prompt(1))
    world.memory.spilling.evict(512)
    world.add(2, prompt(1), 4)
    other = world.add(3, prompt(3), 8)
    steps = 0
    while 3 not in world.done:
        world.step()
        steps += 1
        if other.row >= 0:
            assert len(world.scheduler.loading) == 1
    assert 2 not in world.done and steps < 12
    run(world)
    world.check(2, prompt(1), 4)
    world.check(3, prompt(3), 8)


def test_several_that_want_the_same_wait_for_one_load(make):
    world = make(slots=512, looks=6)
    ask(world, 1, prompt(1))
    world.memory.spilling.evict(512)
    tails = [[*prompt(1), 5000 + i, 5001 + i] for i in range(4)]
    for i, tokens in enumerate(tails):
        world.add(10 + i, tokens, 3)
    world.step()
    assert len(world.scheduler.loading) == 4
    loaded = world.transfer.loaded
    run(world)
    assert world.transfer.loaded == loaded == 5
    for i, tokens in enumerate(tails):
        world.check(10 + i, tokens, 3)


def test_an_aborted_request_leaves_what_it_loads_to_others(make):
    world = make(slots=256, looks=9)
    ask(world, 1, prompt(1))
    world.memory.spilling.evict(256)
    world.add(2, prompt(1), 4)
    world.step()
    assert len(world.scheduler.loading) == 1 and world.memory.usage().private == 79
    world.abort(2)
    world.scheduler.assert_consistent()
    assert world.scheduler.idle
    for _ in range(12):
        world.step()
    assert world.memory.usage().private == 0
    assert world.memory.peek(np.array(prompt(1), np.int32), b"") == 79
    assert ask(world, 3, prompt(1)).cached_tokens == 79


def test_slots_that_are_being_filled_do_not_fail_a_running_request(make):
    """A request that runs alone and grows is not told that memory is full of loads."""
    world = make(slots=128, looks=10**6, step_tokens=128)
    ask(world, 1, prompt(1, 64), new=1)
    world.memory.spilling.evict(128)
    world.add(2, prompt(2, 16), 60)
    world.step()
    world.add(3, [*prompt(1, 64), 3], 1)
    for _ in range(80):
        world.step()
    assert not world.failed
    world.check(2, prompt(2, 16), 60)


def test_namespaces_do_not_meet_in_the_tiers(make):
    world = make(slots=256, disk=100)
    ask(world, 1, prompt(1), namespace=b"a" * 32)
    world.memory.spilling.evict(256)
    rest(world)
    for rid, namespace in enumerate((b"", b"b" * 32), 2):
        assert ask(world, rid, prompt(1), namespace=namespace).cached_tokens == 0
    world.memory.spilling.evict(256)
    assert ask(world, 5, prompt(1), namespace=b"a" * 32).cached_tokens == 79


@pytest.mark.parametrize("only_buffer", [False, True])
@pytest.mark.parametrize("looks", [0, 2])
def test_a_restart_finds_what_is_on_disk(make, only_buffer, looks):
    world = make(slots=256, disk=100, only_buffer=only_buffer, looks=looks)
    for i in range(3):
        ask(world, i, prompt(i))
    world.scheduler.loading.close()
    assert world.transfer.closed
    again = make(slots=256, disk=100, only_buffer=only_buffer, looks=looks)
    assert len(again.tiers.disk) == 15
    for i in range(3):
        assert ask(again, i, prompt(i)).cached_tokens == 79
    counts = again.tiers.counts["disk"]
    assert counts.hit_tokens == 3 * 79 and counts.loads == 3


def test_only_what_leaves_is_lost_with_a_crash(make):
    """Nothing was closed: what had been evicted, or was written ahead, is there."""
    world = make(slots=256, disk=100)
    ask(world, 1, prompt(1))
    rest(world)
    ask(world, 2, prompt(2))
    again = make(slots=256, disk=100)
    assert ask(again, 1, prompt(1)).cached_tokens == 79
    assert ask(again, 2, prompt(2)).cached_tokens == 0


def test_damage_on_disk_costs_time_and_nothing_else(make, caplog):
    world = make(slots=256, disk=100)
    ask(world, 1, prompt(1, 200))
    world.scheduler.loading.close()
    names = world.tiers.names.extend([], np.array(prompt(1, 200), np.int32), b"", 12)
    path = world.tiers.disk.files.path(names[5])
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    again = make(slots=256, disk=100)
    assert ask(again, 1, prompt(1, 200)).cached_tokens == 5 * BLOCK
    assert "not loaded" in caplog.text
    assert again.tiers.facts()["disk"]["refused_blocks"] == 1


def test_the_blocks_of_another_model_are_not_loaded(make):
    world = make(slots=256, disk=100)
    ask(world, 1, prompt(1))
    world.scheduler.loading.close()
    again = make(slots=256, disk=100, stamp=b"x" * 32)
    assert ask(again, 1, prompt(1)).cached_tokens == 0
    assert again.tiers.disk.refused == 5


def test_a_small_buffer_brings_a_long_prompt_piece_by_piece(make):
    world = make(slots=512, disk=200, rows=70, only_buffer=True)
    tokens = prompt(1, 400)
    ask(world, 1, tokens)
    rest(world)
    world.scheduler.loading.close()
    again = make(slots=512, disk=200, rows=8, only_buffer=True)
    assert ask(again, 1, tokens).cached_tokens == 399
    assert again.tiers.counts["disk"].loads >= 6


def test_loading_that_does_not_pay_is_left_off_until_it_is_tried_again(make):
    world = make(slots=256)
    costs = world.tiers.costs
    costs.compute.add(1000, 0.001)
    costs.copy.add(1000, 10.0)
    ask(world, 1, prompt(1))
    world.memory.spilling.evict(256)
    assert ask(world, 2, prompt(1)).cached_tokens == 0
    for i in range(3, 1000):
        world.memory.spilling.evict(256)
        if ask(world, i, prompt(1)).cached_tokens:
            break
    else:
        raise AssertionError("never tried again")


def test_flush_forgets_all_tiers(make, tmp_path):
    world = make(slots=256, disk=100, looks=3)
    for i in range(4):
        ask(world, i, prompt(i))
    world.scheduler.loading.flush()
    world.memory.flush()
    assert world.memory.usage().free == world.memory.total
    assert world.tiers.empty and not list(tmp_path.rglob("*.kv"))
    for i in range(4):
        assert ask(world, 10 + i, prompt(i)).cached_tokens == 0
        world.memory.flush()


def test_what_may_hold_nan_is_kept_nowhere(make):
    world = make(slots=256, disk=100)
    request = world.add(1, prompt(1), 4)
    while request.row < 0 or world.scheduler.rows.computed[request.row] < 80:
        world.step()
    world.scheduler.remove(world.requests.pop(1), poisoned=True)
    world.memory.spilling.evict(256)
    rest(world)
    assert world.tiers.empty


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), looks=st.integers(0, 6), rows=st.integers(1, 40))
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("blocks", [0, 30])
def test_storm(make_world, slot_transfer, overlap, blocks, seed, looks, rows):
    """Many prompts that share beginnings, far more than the slots hold, aborts among them."""
    chance = random.Random(seed)
    transfer = slot_transfer(rows, looks)
    with tempfile.TemporaryDirectory() as folder:
        disk = None
        if blocks:
            files = BlockFiles(Path(folder), b"m" * 32, b"k" * 32, transfer.block_bytes)
            disk = DiskTier(files, blocks * files.disk_bytes)
        tiers = Tiers(transfer, BlockNames(b"secret"), disk, only_buffer=seed % 2 == 1)
        world = make_world(
            slots=240, rows=6, context=240, step_tokens=48, overlap=overlap, tiers=tiers,
            eviction=chance.choice(["lru", "lfu", "program"]),
        )  # fmt: skip
        transfer.kv = world.runner.kv
        prompts = storm(world, chance)
        run(world)
        assert not world.failed and set(world.done) == set(prompts)
        for rid, tokens in prompts.items():
            world.check(rid, tokens, len(world.done[rid]))
        world.scheduler.loading.flush()
        world.scheduler.assert_consistent()
        tiers.settle(10.0)
        assert not tiers.busy and not tiers.host._held
        assert world.memory.usage().held == 0
        if disk is not None:
            assert len(disk) <= blocks
        world.scheduler.loading.close()


def storm(world, chance) -> dict[int, list[int]]:
    prompts: dict[int, list[int]] = {}
    for rid in range(30):
        tokens = prompt(chance.randrange(3), chance.randrange(1, 90))
        if chance.random() < 0.5:
            tokens = [*tokens, *prompt(10 + chance.randrange(3), chance.randrange(1, 40))]
        prompts[rid] = tokens
        world.add(rid, tokens, chance.randrange(1, 12))
        for _ in range(chance.randrange(4)):
            world.step()
        if chance.random() < 0.15 and world.requests:
            gone = chance.choice(list(world.requests))
            world.abort(gone)
            del prompts[gone]
        if chance.random() < 0.1:
            world.memory.spilling.rest()
        world.memory.tiers.host.assert_consistent()
    return prompts


def test_several_wait_for_one_read_also_where_a_part_is_in_host_memory(make):
    world = make(slots=512, disk=100)
    ask(world, 1, prompt(1, 160))
    world.scheduler.loading.close()
    again = make(slots=512, disk=100)
    ask(again, 1, [*prompt(1, 64), 1, 2])
    again.memory.spilling.evict(512)
    again.memory.tree.evict(512)
    assert len(again.tiers.host) == 4
    gate = threading.Event()
    read = again.tiers.disk.files.read

    def slow(name, into):
        gate.wait(10)
        read(name, into)

    again.tiers.disk.files.read = slow
    requests = [again.add(10 + i, [*prompt(1, 160), i], 2) for i in range(3)]
    again.step()
    assert len(again.scheduler.loading) == 3
    assert again.tiers.counts["host"].loads == 1, "that of the request before"
    gate.set()
    run(again)
    assert [request.cached_tokens for request in requests] == [160] * 3
    assert again.tiers.counts["disk"].loads == 2


def test_for_one_that_finds_no_room_the_disk_is_read_ahead(make):
    world = make(slots=256, disk=100)
    ask(world, 1, prompt(1, 160))
    world.scheduler.loading.close()
    again = make(slots=256, disk=100)
    again.add(2, prompt(2, 160), 60)
    again.step()
    last = again.add(1, prompt(1, 160), 4)
    deadline = time.monotonic() + 10
    while len(again.tiers.host) < 10 and time.monotonic() < deadline:
        again.step()
        time.sleep(0.001)
        if 2 in again.done:
            break
    assert 2 not in again.done and last.row < 0
    assert len(again.tiers.host) == 10, "while another runs"
    assert last in again.scheduler.waiting and not len(again.scheduler.loading)
    run(again)
    again.check(1, prompt(1, 160), 4)
    again.check(2, prompt(2, 160), 60)
    assert last.cached_tokens == 159
    assert again.tiers.counts["disk"].loads == 1


@pytest.mark.parametrize("looks", [0, 5])
def test_many_that_come_back_at_once_are_loaded_once_each(make, looks):
    """Loads that all fit one by one, but not together, do not push each other out."""
    world = make(slots=240, looks=looks, rows=200)
    for i in range(10):
        ask(world, i, prompt(i))
    computed = world.runner.computed
    requests = [world.add(100 + i, prompt(i), 4) for i in range(10)]
    run(world)
    for i, request in enumerate(requests):
        world.check(100 + i, prompt(i), 4)
        assert request.cached_tokens == 79, i
    assert world.runner.computed - computed == 10 * 4
