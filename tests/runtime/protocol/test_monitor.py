"""What a monitor tells of a socket, and what it must not hold up."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager

import pytest
import zmq
from ramet.runtime.protocol.monitor import Monitor

EVENTS = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context


@contextmanager
def server(context: zmq.Context, address: str):
    socket = context.socket(zmq.ROUTER)
    socket.bind(address)
    try:
        yield socket
    finally:
        socket.close(0)


async def until(said: list[int], count: int) -> None:
    async with asyncio.timeout(20):
        while len(said) < count:
            await asyncio.sleep(0.005)


def test_it_tells_when_a_peer_is_there_and_when_it_is_gone(context, tmp_path):
    async def check() -> None:
        said: list[int] = []
        address = f"ipc://{tmp_path}/a"
        with context.socket(zmq.DEALER) as socket:
            monitor = Monitor(socket, EVENTS, said.append)
            with server(context, address):
                socket.connect(address)
                await until(said, 1)
            await until(said, 2)
            monitor.close()
        assert said[:2] == [zmq.Event.HANDSHAKE_SUCCEEDED, zmq.Event.DISCONNECTED]

    asyncio.run(check())


def test_a_closed_sockets_name_that_is_still_taken_does_not_matter(context):
    async def check() -> None:
        with context.socket(zmq.DEALER) as socket, context.socket(zmq.PAIR) as other:
            other.bind(f"inproc://monitor.s-{socket.FD}")
            for _ in range(3):
                Monitor(socket, EVENTS, print).close()

    asyncio.run(check())


def test_nothing_waits_for_a_closed_monitor(context, tmp_path):
    async def check() -> None:
        said: list[int] = []
        first, second = f"ipc://{tmp_path}/a", f"ipc://{tmp_path}/b"
        with context.socket(zmq.DEALER) as socket, context.socket(zmq.DEALER) as neighbour:
            with server(context, first), server(context, second) as stays:
                monitor = Monitor(socket, EVENTS, said.append)
                socket.connect(first)
                await until(said, 1)
                monitor.close()
                monitor.close()
                socket.disconnect(first)
                neighbour.connect(second)
                for _ in range(20):
                    socket.connect(first)
                    await asyncio.sleep(0.01)
                    socket.disconnect(first)
                neighbour.send(b"still there")
                assert stays.poll(5000), "libzmq's thread stands still"
        assert said == [zmq.Event.HANDSHAKE_SUCCEEDED]

    asyncio.run(check())
