"""Waiting for messages, awake or asleep."""

from __future__ import annotations

import itertools
import threading
import time
from types import SimpleNamespace

import pytest
import zmq
from ramet.runtime.engine.connections import Connections
from ramet.runtime.memory.kv_memory import KVMemory
from ramet.runtime.protocol.codec import engine_codec
from ramet.runtime.protocol.messages import Credit


@pytest.fixture
def pair(tmp_path):
    """An engine's socket that spins for so long, and a gateway's."""
    made = []

    def make(spin: float) -> SimpleNamespace:
        address = f"ipc://{tmp_path}/e{len(made)}"
        context = zmq.Context()
        connections = Connections(address, KVMemory(32, 16).tree, spin=spin)
        gateway = context.socket(zmq.DEALER)
        gateway.connect(address)
        made.append((connections, gateway, context))
        return SimpleNamespace(connections=connections, gateway=gateway)

    yield make
    for connections, gateway, context in made:
        gateway.close(0)
        context.term()
        connections.close()


def steps(received) -> list[int]:
    return [message.steps for _, message in received]


@pytest.mark.parametrize("spin", [0.0, 0.05, 10.0])
def test_a_message_ends_the_wait(pair, spin):
    both = pair(spin)
    for number in (1, 2, 3):
        later = threading.Timer(
            0.02 * number, both.gateway.send, [engine_codec.encode(Credit(steps=number))]
        )
        later.start()
        began = time.monotonic()
        assert steps(both.connections.receive(5.0)) == [number]
        assert time.monotonic() - began < 4.0
        later.join()


@pytest.mark.parametrize("spin", [0.0, 0.05, 10.0])
def test_no_longer_than_asked(pair, spin):
    both = pair(spin)
    both.gateway.send(engine_codec.encode(Credit(steps=1)))
    assert steps(both.connections.receive(5.0)) == [1]
    began = time.monotonic()
    assert steps(both.connections.receive(0.1)) == []
    assert 0.09 < time.monotonic() - began < 1.0


@pytest.mark.timeout(20)
def test_who_looks_too_late_does_not_wait_for_ever(pair, monkeypatch):
    """On a busy machine the time may be over, by much, when it is looked at again."""
    both = pair(10.0)
    both.gateway.send(engine_codec.encode(Credit(steps=1)))
    assert steps(both.connections.receive(5.0)) == [1]
    clock = itertools.count(time.monotonic(), 0.06)
    late = SimpleNamespace(monotonic=lambda: next(clock))
    monkeypatch.setattr("ramet.runtime.engine.connections.time", late)
    assert steps(both.connections.receive(0.1)) == []


def test_it_looks_awake_only_for_a_while_after_a_message(pair):
    both = pair(10.0)
    poller, waits = both.connections._poller, []

    def poll(timeout: int) -> list:
        waits.append(timeout)
        return poller.poll(timeout)

    both.connections._poller = SimpleNamespace(poll=poll)
    assert steps(both.connections.receive(0.05)) == []
    assert len(waits) == 1
    assert waits[0] > 0
    both.gateway.send(engine_codec.encode(Credit(steps=1)))
    assert steps(both.connections.receive(5.0)) == [1]
    waits.clear()
    assert steps(both.connections.receive(0.05)) == []
    assert waits[:3] == [0, 0, 0]
