"""Clients that speak to the service over lanes: the same words, rights and limits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import pytest
import zmq
from ramet.runtime.gateway.service import ServiceLimits
from ramet.runtime.protocol.codec import client_codec, gateway_codec
from ramet.runtime.protocol.lane import Lane, connect
from ramet.runtime.protocol.messages import (
    AbortGenerate,
    Control,
    ControlReply,
    Generate,
    Generated,
    GenerateFailed,
    Hello,
    ProgramEvents,
    Refused,
    Welcome,
)


class LaneClient:
    def __init__(self, address: str) -> None:
        lane = connect(address, 1 << 26)
        assert lane is not None
        self.lane: Lane = lane
        self._there: list[Any] = []

    def send(self, *messages: Any) -> None:
        self.lane.send([client_codec.encode(message) for message in messages])

    async def next(self) -> Any:
        deadline = asyncio.get_running_loop().time() + 5
        while not self._there:
            assert asyncio.get_running_loop().time() < deadline, "nothing came"
            with contextlib.suppress(BlockingIOError):
                self.lane.flush()
            for data in self.lane.receive():
                message = gateway_codec.decode(data)
                if not isinstance(message, ProgramEvents):  # the service's probe
                    self._there.append(message)
            await asyncio.sleep(0.002)
        return self._there.pop(0)

    async def greet(self, api_key: str | None = None) -> Any:
        self.send(Hello(version=1, client="lane", api_key=api_key))
        return await self.next()


@pytest.fixture
async def client(world):
    await world.serve()
    made = LaneClient(world.address)
    assert isinstance(await made.greet(), Welcome)
    yield made
    made.lane.close()


def asked(rid: str = "a", **sampling: Any) -> Generate:
    return Generate(rid=rid, prompt="abc", sampling={"max_new_tokens": 3, **sampling})


async def test_a_request_is_answered(client):
    client.send(asked("a"), asked("b", n=2))
    answers = {(await client.next()).rid for _ in range(2)}
    assert answers == {"a", "b"}


async def test_an_answer_is_that_of_the_socket(world, client):
    client.send(asked(temperature=0))
    over_lane = await client.next()
    other = world.client()
    await other.greet()
    other.send(asked(temperature=0))
    over_socket = await other.next()
    assert isinstance(over_lane, Generated)
    assert (over_lane.texts, over_lane.output_ids) == (over_socket.texts, over_socket.output_ids)


async def test_errors_are_told_and_the_lane_lives_on(client):
    client.send(asked(temperature=-1))
    assert "temperature" in (await client.next()).error.message
    client.lane.send([b"\xc1 nonsense"])
    assert isinstance(await client.next(), Refused)
    client.send(Control(id=1, op="server_info"))
    assert isinstance(await client.next(), ControlReply)


@pytest.mark.parametrize(("key", "kind"), [(None, Refused), ("no", Refused), ("yes", Welcome)])
async def test_the_key_is_checked(world, key, kind):
    await world.serve(api_key="yes")
    made = LaneClient(world.address)
    made.send(asked())
    assert "hello" in (await made.next()).error.message
    assert isinstance(await made.greet(key), kind)
    made.lane.close()


async def test_a_socket_that_calls_itself_a_lane_has_none_of_its_rights(world):
    """A ZMQ peer chooses its identity."""
    await world.serve(api_key="yes")
    made = LaneClient(world.address)
    assert isinstance(await made.greet("yes"), Welcome)
    for identity in (b"1", b"lane1", (1).to_bytes(1, "little"), (1).to_bytes(4, "big")):
        with contextlib.closing(zmq.Context.instance().socket(zmq.DEALER)) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.ROUTING_ID, identity)
            socket.connect(world.address)
            socket.send(client_codec.encode(asked()))
            while not socket.poll(0):
                await asyncio.sleep(0.005)
            assert isinstance(gateway_codec.decode(socket.recv()), Refused)
    made.lane.close()


async def test_abort(world, client):
    world.engine.idle = True
    client.send(asked("a"), asked("b"))
    await world.settle(lambda: len(world.engine.running) == 2)
    client.send(AbortGenerate(rid="a"))
    answer = await client.next()
    assert isinstance(answer, GenerateFailed)
    assert (answer.rid, answer.error.kind) == ("a", "aborted")
    await world.settle(lambda: len(world.engine.running) == 1)


async def test_abort_in_the_same_breath(world, client):
    world.engine.idle = True
    client.send(asked("a"), AbortGenerate(rid="a"))
    assert (await client.next()).error.kind == "aborted"
    await world.settle(lambda: not world.engine.running and not world.client_of_engine.in_flight)


async def test_a_client_that_is_gone_loses_its_work_at_once(world, client):
    world.engine.idle = True
    client.send(asked("a"), asked("b"))
    await world.settle(lambda: len(world.engine.running) == 2)
    service = world.services[0]
    client.lane.close()
    await world.settle(lambda: not world.engine.running, seconds=0.8)  # before a probe tells
    await world.settle(lambda: len(service._clients) == 0)


def scored(rid: str) -> Generate:
    """With an answer of some 15 KB."""
    sampling = {"max_new_tokens": 2, "return_logprob": True, "logprob_start_len": 0}
    return Generate(rid=rid, prompt="a" * 480, sampling=sampling)


@pytest.fixture
def narrow(monkeypatch):
    """Lanes that hold little."""
    monkeypatch.setattr("ramet.runtime.protocol.lane._BUFFER", 1 << 14)


async def test_a_client_that_does_not_read_is_cut_off(world, narrow, caplog):
    caplog.set_level(logging.WARNING)
    await world.serve(limits=ServiceLimits(buffered_bytes=100_000))
    made = LaneClient(world.address)
    await made.greet()
    made.send(*(scored(f"{i}") for i in range(40)))
    service = world.services[0]
    await world.settle(lambda: len(service._clients) == 0, seconds=20)
    assert "does not read" in caplog.text
    made.lane.close()


async def test_one_that_reads_late_gets_all(world, narrow):
    await world.serve()
    made = LaneClient(world.address)
    await made.greet()
    made.send(*(scored(f"{i}") for i in range(40)))
    await world.settle(lambda: any(client.blocked for client in world.services[0]._clients))
    await world.settle(lambda: not world.client_of_engine.in_flight, seconds=20)
    assert {(await made.next()).rid for _ in range(40)} == {f"{i}" for i in range(40)}
    made.lane.close()


async def test_a_message_far_over_the_limit_ends_the_lane_only(world):
    await world.serve(limits=ServiceLimits(message_bytes=1000))
    made, other = LaneClient(world.address), LaneClient(world.address)
    await made.greet()
    await other.greet()
    made.send(Generate(rid="a", prompt="x" * 1500))
    assert "1000" in (await made.next()).error.message
    made.send(Generate(rid="a", prompt="x" * 2000))
    service = world.services[0]
    await world.settle(lambda: len(service._clients) == 1)
    other.send(asked())
    assert isinstance(await other.next(), Generated)
    made.lane.close()
    other.lane.close()


async def test_a_lane_kept_for_later_is_told_nothing(world, client, monkeypatch):
    """Nobody reads it: what it holds would fill up, and be tried again 200 times a second."""
    monkeypatch.setattr("ramet.runtime.gateway.clients.PROBE_S", 0.01)
    clients = world.services[0]._clients
    clients._probe_timer.cancel()
    clients._probe()
    await asyncio.sleep(0.1)
    assert not client.lane.receive()
    client.send(asked())
    assert isinstance(await client.next(), Generated)


async def test_who_is_found_to_be_gone_begins_nothing_more(world, client):
    world.engine.idle = True
    service = world.services[0]
    client.send(asked(temperature=-1), *(asked(f"{i}") for i in range(5)))
    client.lane.close()  # before any of it is looked at
    await world.settle(lambda: len(service._clients) == 0)
    await asyncio.sleep(0.05)
    assert not world.client_of_engine.in_flight
    assert not world.engine.running


async def test_what_was_said_before_the_end_goes_out(world, narrow):
    service = await world.serve()
    made = LaneClient(world.address)
    await made.greet()
    made.send(*(scored(f"{i}") for i in range(24)))
    await world.settle(lambda: any(lane.blocked for lane in service._clients._lanes.values()))
    await world.settle(lambda: not any(client.busy for client in service._clients), seconds=20)
    closing = asyncio.ensure_future(service.close())
    assert {(await made.next()).rid for _ in range(24)} == {f"{i}" for i in range(24)}
    await closing
    made.lane.close()
