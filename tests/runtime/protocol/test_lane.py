"""Whole messages over a stream, however the kernel cuts it."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import struct
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ramet.runtime.protocol.lane import Lane, accept, connect, lane_path, listen
from ramet.runtime.protocol.lane_wire import LaneWire
from ramet.runtime.protocol.wire import MOST_FRAMES

MOST = 4 << 20


def pair(most: int = MOST) -> tuple[Lane, Lane]:
    one, other = socket.socketpair()
    return Lane(one, most), Lane(other, most)


def all_of(lane: Lane) -> list[bytes]:
    """What is there and comes, to the end of the lane."""
    messages: list[bytes] = []
    try:
        while True:
            messages += lane.receive()
    except ConnectionError:
        return messages


@settings(max_examples=60, deadline=None)
@given(
    messages=st.lists(st.binary(max_size=300), max_size=12),
    cuts=st.lists(st.integers(1, 200), min_size=1, max_size=20),
)
def test_messages_come_whole_wherever_the_stream_is_cut(messages, cuts):
    stream = b"".join(struct.pack("<I", len(m)) + m for m in messages)
    one, other = socket.socketpair()
    with closing(Lane(other, MOST)) as lane:
        got: list[bytes] = []
        at = 0
        while at < len(stream):
            size = cuts[at % len(cuts)]
            one.sendall(stream[at : at + size])
            at += size
            got += lane.receive()
        one.close()
        assert got + all_of(lane) == messages


def test_what_the_peer_has_no_room_for_waits_and_keeps_its_order():
    one, other = pair()
    messages: list[bytes] = []
    while not one.blocked or len(messages) < 10:
        messages.append(bytes([len(messages) % 256]) * (300_000 + len(messages)))
        one.send(messages[-1:])
        assert len(messages) < 1000
    one.send([b"behind"])
    messages.append(b"behind")
    got: list[bytes] = []
    while len(got) < len(messages):
        got += other.receive()
        one.flush()
    assert got == messages
    assert not one.blocked
    one.close()
    other.close()


def test_nothing_there_is_no_end_and_the_end_comes_after_all_messages():
    one, other = pair()
    assert other.receive() == []
    one.send([b"a", b"", b"b"])
    one.close()
    assert other.receive() == [b"a", b"", b"b"]
    with pytest.raises(ConnectionError):
        other.receive()
    with pytest.raises(ConnectionError):
        for _ in range(2):
            other.send([b"to nobody"])
    other.close()


def test_a_message_over_the_limit_ends_the_lane_before_it_is_taken_in():
    one, other = pair(most=100)
    one.send([b"x" * 100])
    assert other.receive() == [b"x" * 100]
    one._socket.sendall(struct.pack("<I", 101))
    with pytest.raises(ConnectionError, match="101"):
        other.receive()
    one.close()
    other.close()


def test_only_this_user_may_come_in_and_a_dead_ones_socket_is_replaced(tmp_path):
    address = f"ipc://{tmp_path}/gateway.ipc"
    path = lane_path(address)
    assert path is not None
    before = listen(path)
    before.close()  # as one that was killed: its file stays
    before_umask = os.umask(0)
    try:
        listener = listen(path)
    finally:
        os.umask(before_umask)
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
    assert accept(listener, MOST) is None
    with closing(listener):
        lane = connect(address, MOST)
        assert lane is not None
        theirs = accept(listener, MOST)
        assert theirs is not None
        lane.send([b"hello"])
        assert theirs.receive() == [b"hello"]
        lane.close()
        theirs.close()


@pytest.mark.parametrize(
    "address",
    ["tcp://127.0.0.1:7411", "ipc://relative", "ipc://@abstract", "ipc:///tmp/" + "x" * 100],
)
def test_some_addresses_have_no_lane(address):
    assert lane_path(address) is None
    assert connect(address, MOST) is None


def test_no_lane_where_nobody_listens(tmp_path):
    assert connect(f"ipc://{tmp_path}/nobody.ipc", MOST) is None


async def until(check, seconds: float = 5.0) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    while not check():
        assert asyncio.get_running_loop().time() < deadline, "it never came to hold"
        await asyncio.sleep(0.005)


async def test_what_is_posted_in_one_turn_comes_together():
    one, other = pair()
    got: list[list[bytes]] = []
    wire = LaneWire(one, lambda _: None, lambda: None)
    reader = LaneWire(other, got.append, lambda: None)
    for i in range(5):
        wire.post(b"%d" % i)
    assert got == []
    await until(lambda: got)
    assert got == [[b"0", b"1", b"2", b"3", b"4"]]
    for _ in range(MOST_FRAMES + 1):
        wire.post(b"")
    await until(lambda: sum(map(len, got)) == 5 + MOST_FRAMES + 1)
    assert max(map(len, got)) <= MOST_FRAMES
    wire.close()
    reader.close()


async def test_a_full_lane_takes_no_more_and_empties_by_itself():
    one, other = pair()
    wire = LaneWire(one, lambda _: None, lambda: None)
    big = b"x" * 1_000_000
    sent = 0
    while wire.send(big):
        sent += 1
        assert sent < 100
    wire.post(b"last")  # what is posted goes out however much waits
    await asyncio.sleep(0)
    got: list[bytes] = []
    reader = LaneWire(other, got.extend, lambda: None)
    await until(lambda: got and got[-1] == b"last")
    assert got == [big] * (sent + 1) + [b"last"] or got == [big] * sent + [b"last"]
    assert wire.send(b"again")
    await until(lambda: got[-1] == b"again")
    wire.close()
    reader.close()


async def test_the_end_is_told_once_after_the_last_messages():
    one, other = pair()
    told: list[object] = []
    reader = LaneWire(other, told.append, lambda: told.append("gone"))
    one.send([b"a"])
    one.close()
    await until(lambda: "gone" in told)
    await asyncio.sleep(0.02)
    assert told == [[b"a"], "gone"]
    with pytest.raises(ConnectionError):
        reader.send(b"b")
    reader.post(b"c")  # nobody hears it, and nothing breaks
    await asyncio.sleep(0.01)
    reader.close()
