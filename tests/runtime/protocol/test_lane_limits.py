"""Lanes where the system has no more to give, and in forks."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import time
from pathlib import Path

import pytest
from ramet.runtime.engine.lanes import Lanes
from ramet.runtime.protocol import lane as lane_module
from ramet.runtime.protocol.lane import Lane, accept, lane_path

MOST = 1 << 20
DESCRIPTORS = Path("/proc/self/fd")


def connect(address: str) -> Lane:
    made = lane_module.connect(address, MOST)
    assert made is not None
    return made


def listen(address: str) -> lane_module.Listener:
    path = lane_path(address)
    assert path is not None
    return lane_module.listen(path)


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path}/g.ipc"


@contextlib.contextmanager
def no_descriptors():
    """In here this process cannot open anything."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(free, 3), hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)


def test_nobody_connects_without_a_descriptor_and_nothing_breaks(address):
    with contextlib.closing(listen(address)):
        with no_descriptors():
            assert lane_module.connect(address, MOST) is None
        connect(address).close()


def test_peers_are_turned_away_where_there_are_no_descriptors(address):
    with contextlib.closing(listen(address)) as listener:
        lanes = [connect(address) for _ in range(3)]
        with no_descriptors():
            for _ in range(2):
                assert accept(listener, MOST) is None
            assert not select.select([listener], [], [], 0)[0], "it would wake for ever"
        for lane in lanes:
            with pytest.raises(ConnectionError):
                lane.receive()
            lane.close()
        lane = connect(address)
        theirs = accept(listener, MOST)
        assert theirs is not None, "descriptors are back, and so are lanes"
        lane.send([b"a"])
        assert theirs.receive() == [b"a"]
        lane.close()
        theirs.close()


def test_an_engine_without_descriptors_sleeps(address):
    zmq = pytest.importorskip("zmq")
    poller = zmq.Poller()
    lanes = Lanes(address, poller)
    peer = connect(address)
    with no_descriptors():
        ready = [descriptor for descriptor, _ in poller.poll(1000)]
        assert ready
        assert not list(lanes.receive(ready))
        assert not poller.poll(0)
    peer.close()
    lanes.close()


def test_a_listener_gives_back_all_it_holds(address):
    before = len(list(DESCRIPTORS.iterdir()))
    for _ in range(5):
        listener = listen(address)
        listener.close()
        listener.close()
    assert len(list(DESCRIPTORS.iterdir())) == before


def test_a_lane_ends_with_its_owner_though_a_fork_lives():
    one, other = socket.socketpair()
    lane, theirs = Lane(one, MOST), Lane(other, MOST)
    stay, end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        os.read(stay, 1)
        os._exit(0)
    try:
        lane.send([b"still"])
        assert theirs.receive() == [b"still"], "the child took nothing away"
        time.sleep(0.05)  # the child gives it up in its own time
        lane.close()
        deadline = time.monotonic() + 5
        with pytest.raises(ConnectionError):
            while time.monotonic() < deadline:
                theirs.receive()
    finally:
        os.close(end)
        os.close(stay)
        os.waitpid(child, 0)
        theirs.close()
