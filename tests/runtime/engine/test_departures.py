"""How requests leave: what is given back, what is counted, who is told."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import zmq
from ramet.runtime.engine.connections import Connections
from ramet.runtime.engine.handles import Handles
from ramet.runtime.engine.loop import Engine
from ramet.runtime.memory.kv_memory import KVMemory
from ramet.runtime.protocol.messages import Abort, EngineSampling, Submit
from ramet.runtime.scheduler.limits import Limits
from ramet.runtime.scheduler.scheduler import Scheduler

VOCAB, SLOTS = 26, 64


class Told:
    """In the place of a recorder."""

    def __init__(self):
        self.counted = {}

    def ended(self, request, *, counted):
        self.counted[request.rid] = counted

    def close(self):
        pass


@pytest.fixture(params=[False, True], ids=["sync", "overlap"])
def small(request, tmp_path, simulated_runner, fake_runner, client_class, token_bytes):
    """An engine whose memory holds one long request, a gateway, and what the recorder is told."""
    address = f"ipc://{tmp_path}/engine"
    memory = KVMemory(SLOTS, 16)
    scheduler = Scheduler(Limits(max_rows=4, context_length=256), memory)
    runner = fake_runner(simulated_runner(SLOTS, 16, 4, 256, VOCAB), request.param, 0.001)
    told = Told()
    engine = Engine(
        runner, scheduler, Connections(address, memory.tree), token_bytes, recorder=told
    )
    thread = threading.Thread(target=engine.run, daemon=True)
    thread.start()
    context = zmq.Context()
    client = client_class(context, address)
    yield SimpleNamespace(client=client, runner=runner, told=told)
    engine.stop()
    thread.join(5)
    client.socket.close(0)
    context.term()
    scheduler.assert_consistent()


def test_who_fills_the_memory_alone_fails_and_the_engine_goes_on(small):
    client = small.client
    client.submit(1, [1, 2, 3], 200)
    client.pump(lambda: 1 in client.finished)
    finish = client.finished[1]
    assert finish.reason == "abort"
    assert "max_total_tokens" in finish.error.message
    assert len(client.tokens[1]) > SLOTS // 2
    assert len(client.run(2, [4, 5], 6)) == 6
    info = client.ask(1, "info").data
    assert info["pages"]["held"] == 0
    assert info["finished"] == 2, "it was served, as far as could be"


def test_what_somebody_aborted_does_not_count(small):
    client = small.client
    client.run(1, [1, 2], 3)
    client.submit(2, [3, 4], 50)
    client.pump(lambda: 2 in client.tokens)
    client.send(Abort(rids=[2]))
    client.pump(lambda: 2 in client.finished)
    small.runner.nan_rows = set(range(4))
    client.run(3, [5, 6], 3)
    assert client.finished[3].error is not None
    assert small.told.counted == {1: True, 2: False, 3: True}
    info = client.ask(1, "info").data
    assert (info["finished"], info["prompt_tokens"]) == (2, 4)
    assert info["computed_tokens"] == info["step_tokens"]["sum"] >= 6


def test_marks_and_the_base_are_renewed_at_the_end(small, monkeypatch):
    client, renewed = small.client, []
    monkeypatch.setattr(Handles, "renew", lambda _, *what: renewed.append(what))
    client.run(1, [1, 2, 3], 2, keep=7)
    client.send(
        Submit(
            rid=2,
            ids=b"",
            base=7,
            base_len=3,
            sampling=EngineSampling(max_new_tokens=2),
            marks=((8, 2),),
            remaining=5,
        )
    )
    client.pump(lambda: 2 in client.finished)
    assert renewed == [(8, 5), (7, 5)]
