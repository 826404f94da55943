"""Generations that are ended before their time."""

from __future__ import annotations

from ramet.runtime.gateway.generate import generate
from ramet.runtime.gateway.stopper import Stopper
from ramet.runtime.protocol.messages import Generate


async def test_what_begins_after_the_stop_ends_at_once(world):
    await world.client_of_engine.start(5)
    world.engine.idle = True
    stopper = Stopper()
    stopper.stop("because")
    message = Generate(rid="r", prompt="ab", sampling={"n": 2})
    result = await generate(world.executor, message, 1, lambda _: None, stopper)
    assert result.texts == ["", ""]
    for meta in result.metas:
        assert meta.finish_reason.type == "abort"
        assert meta.finish_reason.message == "because"
    await world.settle(lambda: len(world.engine.aborted) == 2)
    assert not world.client_of_engine.in_flight


async def test_a_stop_after_the_end_changes_nothing(world):
    await world.client_of_engine.start(5)
    world.engine.says("x")
    stopper = Stopper()
    message = Generate(rid="r", prompt="ab", sampling={})
    result = await generate(world.executor, message, 1, lambda _: None, stopper)
    stopper.stop("too late")
    assert result.texts == ["x"]
    assert result.metas[0].finish_reason.type == "stop"
    assert world.engine.aborted == []
