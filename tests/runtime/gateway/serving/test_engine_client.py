"""The connection to the engine: credits, silence, death, coming back, aborts, errors."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import numpy as np
import pytest
from ramet.runtime.gateway.engine_client import CREDITS, EngineClient
from ramet.runtime.protocol import BackendError, ContextLengthError
from ramet.runtime.protocol.errors import ErrorInfo
from ramet.runtime.protocol.messages import Answer, EngineSampling, Finish, StepOut

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
