"""Gateways that speak to the engine over lanes."""

from __future__ import annotations

import threading
import time

import pytest
import zmq
from ramet.runtime.engine.connections import Connections
from ramet.runtime.memory.kv_memory import KVMemory
from ramet.runtime.protocol.codec import engine_codec, reply_codec
from ramet.runtime.protocol.lane import Lane, connect
from ramet.runtime.protocol.messages import Answer, Beat, Credit, Finish


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path}/engine.ipc"


@pytest.fixture
def connections(address):
    made = Connections(address, KVMemory(32, 16).tree)
    yield made
    made.close()


@pytest.fixture
def lane(connections, address):
    made = connect(address, 1 << 26)
    assert made is not None
    yield made
    made.close()


def credit(steps: int) -> bytes:
    return engine_codec.encode(Credit(steps=steps))


def take(connections: Connections, count: int = 1) -> list:
    """The next messages, with who said them; a lane is accepted by one look, read by the next."""
    got = []
    deadline = time.monotonic() + 5
    while len(got) < count:
        assert time.monotonic() < deadline
        got += connections.receive(0.05)
    return got


def read(lane: Lane) -> list:
    deadline = time.monotonic() + 5
    while not (found := lane.receive()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return [reply_codec.decode(data) for data in found]


def test_messages_and_replies(connections, lane):
    lane.send([credit(1), credit(2), b"\xc1 nonsense", credit(3)])
    got = take(connections, 3)
    assert [message.steps for _, message in got] == [1, 2, 3]
    (peer,) = {id(peer): peer for peer, _ in got}.values()
    peer.outbox.credits = 1
    peer.outbox.finish(Finish(rid=7, reason="stop"))
    connections.flush()
    (reply,) = read(lane)
    assert reply.finished[0].rid == 7


@pytest.mark.parametrize("wait", [0.0, 5.0])
def test_a_message_ends_the_wait(connections, lane, wait):
    take_in = threading.Timer(0.05, lane.send, [[credit(9)]])
    take_in.start()
    began = time.monotonic()
    got = []
    while not got and time.monotonic() < began + 4:
        got = [message.steps for _, message in connections.receive(wait)]
    assert got == [9]
    take_in.join()


def test_a_lane_and_a_socket_are_two_peers(connections, lane, address):
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(address)
    try:
        lane.send([credit(1)])
        ((over_lane, _),) = take(connections)
        socket.send(credit(2))
        ((over_socket, _),) = take(connections)
        assert over_lane is not over_socket
        connections.beat(1, 0, 0)
        assert isinstance(read(lane)[0], Beat)
        assert socket.poll(2000)
        assert isinstance(reply_codec.decode(socket.recv()), Beat)
    finally:
        socket.close(0)
        context.term()


def test_who_closes_a_lane_is_lost_once(connections, lane):
    lane.send([credit(1)])
    ((peer, _),) = take(connections)
    lane.send([credit(2)])
    lane.close()
    got = take(connections)
    assert [message.steps for _, message in got] == [2]
    deadline = time.monotonic() + 5
    while not connections.lost:
        assert time.monotonic() < deadline
        assert not list(connections.receive(0.05))
    connections.send(peer, Answer(id=1))
    assert connections.lost == [peer]
    connections.drop(peer)
    assert not list(connections)


def test_who_cannot_be_told_is_lost(connections, lane):
    lane.send([credit(1)])
    ((peer, _),) = take(connections)
    lane.close()
    connections.send(peer, Answer(id=1))
    assert connections.lost == [peer]


def test_a_slow_reader_gets_all_and_delays_nobody(connections, lane):
    lane.send([credit(1)])
    ((peer, _),) = take(connections)
    count, data = 60, {"x": "y" * 500_000}
    began = time.monotonic()
    for number in range(count):
        connections.send(peer, Answer(id=number, data=data))
    assert time.monotonic() - began < 2.0
    assert connections._lanes._lanes[peer.identity].blocked
    got = []
    while len(got) < count:
        got += [reply_codec.decode(message).id for message in lane.receive()]
        assert not list(connections.receive(0.0))  # the engine's loop, which goes on sending
    assert got == list(range(count))
    assert connections.receive(0.0) is not None
    assert not connections._poller.poll(0), "it would look for room for ever"


def test_the_lane_is_there_when_the_socket_is(address):
    made = Connections(address, KVMemory(32, 16).tree)
    made.close()
    again = Connections(address, KVMemory(32, 16).tree)  # beside what the one before left
    try:
        lane = connect(address, 1 << 20)
        assert lane is not None
        lane.send([credit(1)])
        assert len(take(again)) == 1
        lane.close()
    finally:
        again.close()
