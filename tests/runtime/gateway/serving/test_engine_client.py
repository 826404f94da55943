"""The connection to the engine: credits, silence, death, coming back, aborts, errors."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import numpy as np
import pytest
import zmq
from ramet.runtime.gateway.engine_client import CREDITS, EngineClient
from ramet.runtime.protocol import BackendError, ContextLengthError
from ramet.runtime.protocol.codec import engine_codec, reply_codec
from ramet.runtime.protocol.errors import ErrorInfo
from ramet.runtime.protocol.lane import Lane, accept, lane_path, listen
from ramet.runtime.protocol.messages import (
    Answer,
    Ask,
    Beat,
    EngineSampling,
    Finish,
    StepOut,
    Submit,
)
from ramet.runtime.protocol.wire import Wire

SAMPLING = EngineSampling(max_new_tokens=5)
PROMPT = np.asarray([1, 2, 3], np.int32)


async def finished(request):
    while not await request.news():
        pass
    return request


async def test_no_engine_is_an_error_that_names_the_address(tmp_path):
    client = EngineClient(f"ipc://{tmp_path}/nobody")
    with pytest.raises(BackendError, match="nobody"):
        await client.start(0.05)
    client.close()


async def test_credit_is_given_back_as_it_is_used(world):
    client = world.client_of_engine
    await client.start(5)
    world.engine.next_token = lambda tokens: 97
    request = client.submit(PROMPT, EngineSampling(max_new_tokens=500))
    await finished(request)
    assert len(request.tokens) == 500
    assert 0 < world.engine.credits <= CREDITS


async def test_waiters_that_want_no_stream_wake_once(world):
    client = world.client_of_engine
    await client.start(5)
    world.engine.next_token = lambda tokens: 97
    quiet = client.submit(PROMPT, SAMPLING)
    assert await quiet.news()
    loud = client.submit(PROMPT, EngineSampling(max_new_tokens=50), streaming=True)
    wakes = 1
    while not await loud.news():
        wakes += 1
    assert wakes > 1


async def test_an_engines_error_is_raised_as_what_it_is(world):
    world.engine.idle = True
    client = world.client_of_engine
    await client.start(5)
    request = client.submit(PROMPT, SAMPLING)
    await world.settle(lambda: bool(world.engine.running))
    error = ErrorInfo("context_length", "too long")
    finish = Finish(rid=request.rid, reason="abort", error=error)
    world.engine.send(StepOut(rids=b"", tokens=b"", finished=[finish]))
    with pytest.raises(ContextLengthError, match="too long"):
        await request.news()


async def test_silence_is_noticed_and_a_beat_ends_it(world):
    client = EngineClient(world.engine_address, silence_s=0.05)
    try:
        world.engine.idle = True
        await client.start(5)
        request = client.submit(PROMPT, SAMPLING)
        with pytest.raises(BackendError, match="nothing heard"):
            await asyncio.wait_for(request.news(), 3)
        with pytest.raises(BackendError, match="nothing heard"):
            client.submit(PROMPT, SAMPLING)
        await world.settle(lambda: request.rid in world.engine.aborted)
        world.engine.beat()
        await world.settle(lambda: client.gone is None)
    finally:
        client.close()


FROZEN = """
import sys, zmq
from ramet.runtime.protocol.codec import engine_codec, reply_codec
from ramet.runtime.protocol.messages import Answer, Ask
socket = zmq.Context().socket(zmq.ROUTER)
socket.bind(sys.argv[1])
while True:
    peer, *messages = socket.recv_multipart()
    for message in map(engine_codec.decode, messages):
        if not isinstance(message, Ask):
            continue
        socket.send_multipart([peer, reply_codec.encode(Answer(id=message.id, data={"a": 1}))])
"""


async def test_a_frozen_engine_is_noticed_by_its_heartbeat(tmp_path):
    address = f"ipc://{tmp_path}/engine"
    process = subprocess.Popen([sys.executable, "-P", "-c", FROZEN, address])
    client = EngineClient(address, heartbeat_s=1.0)
    try:
        await client.start(30)
        request = client.submit(PROMPT, SAMPLING)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(BackendError, match="gone"):
            await asyncio.wait_for(request.news(), 10)
    finally:
        client.close()
        process.kill()
        process.wait()


async def test_another_engine_at_the_address_is_taken_up(world):
    client = world.client_of_engine
    await client.start(5)
    world.engine.die()
    await world.settle(lambda: client.gone is not None)
    with pytest.raises(BackendError, match="gone"):
        await client.ask("info")
    world.engine = type(world.engine)(world.engine_address, world.tokenizer)
    await world.settle(lambda: client.gone is None)
    world.engine.next_token = lambda tokens: 97
    request = await finished(client.submit(PROMPT, SAMPLING))
    assert request.tokens == [97] * 5


class LaneEngine:
    """Says hello where it is told to, and takes one lane."""

    def __init__(self, address: str) -> None:
        self.listener = listen(lane_path(address) or "")
        self.lane: Lane | None = None
        self.asked: list[Ask] = []
        socket = zmq.Context.instance().socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(address)
        self.wire = Wire(socket, self._take)

    def _take(self, frames: list[bytes]) -> None:
        self.peer = frames[0]
        got = map(engine_codec.decode, frames[1:])
        self.asked += [message for message in got if isinstance(message, Ask)]

    def say(self, message: Answer | Beat) -> None:
        self.wire.send([self.peer, reply_codec.encode(message)])

    def takes_lane(self) -> bool:
        self.lane = accept(self.listener, 1 << 20)
        return self.lane is not None

    def submits(self) -> list[Submit]:
        assert self.lane is not None
        got = map(engine_codec.decode, self.lane.receive())
        return [message for message in got if isinstance(message, Submit)]


async def test_what_a_dead_engine_said_last_does_not_bring_it_back(world, tmp_path):
    """Requests go to another one once: they must not be spent on a dead one."""
    address = f"ipc://{tmp_path}/engine"
    engine = LaneEngine(address)
    client = EngineClient(address, resubmit=True)
    try:
        await world.settle(lambda: len(engine.asked) == 1)
        engine.say(Answer(id=engine.asked[0].id, data={"a": 1}))
        await world.settle(engine.takes_lane)
        request = client.submit(PROMPT, SAMPLING)
        await world.settle(lambda: bool(engine.submits()))
        assert engine.lane is not None
        engine.lane.close()
        await world.settle(lambda: client.gone is not None)
        engine.say(Beat(step=0, running=1, waiting=0))
        await asyncio.sleep(0.1)
        assert client.gone is not None
        assert client.in_flight == 1
        await world.settle(lambda: len(engine.asked) == 2)
        engine.say(Answer(id=engine.asked[1].id, data={"a": 1}))
        await world.settle(engine.takes_lane)
        again: list[Submit] = []
        await world.settle(lambda: bool(again.extend(engine.submits()) or again))
        assert again[0].rid == request.rid
        assert client.gone is None
    finally:
        client.close()
        engine.wire.close()
        engine.listener.close()
        if engine.lane is not None:
            engine.lane.close()


async def test_close_fails_who_waits(world):
    world.engine.idle = True
    client = world.client_of_engine
    await client.start(5)
    request = client.submit(PROMPT, SAMPLING)
    client.close()
    client.close()
    with pytest.raises(BackendError, match="closed"):
        await request.news()


async def test_answers_of_nonsense_are_logged_and_survived(world, caplog):
    client = world.client_of_engine
    await client.start(5)
    world.engine.wire.send([world.engine.connection, b"\xc1nonsense"])
    assert await client.ask("info")
    assert "malformed" in caplog.text


async def test_an_unanswered_question_times_out(world):
    client = world.client_of_engine
    await client.start(5)
    world.engine._answer = lambda ask: None
    with pytest.raises(BackendError, match="did not answer 'info'"):
        await client.ask("info", 0.05)


@pytest.mark.parametrize(("says", "spins"), [({}, 0.0), ({"spin_seconds": 0.25}, 0.25)])
async def test_it_stays_awake_no_longer_than_the_engine_would(world, says, spins):
    data = {"context_length": 512, **says}
    world.engine._answer = lambda ask: world.engine.send(Answer(id=ask.id, data=data))
    for wish in (0.0, 1.0):
        client = EngineClient(world.engine_address, spin=wish)
        await client.start(5)
        assert client._line._awake._patience._seconds == min(spins, wish)
        client.close()
