from __future__ import annotations

import asyncio
import time

import pytest
import ramet as rt


@rt.function
def two(s, word):
    s += word + rt.gen("a")
    s += "then" + rt.gen("b")
    return s["a"] + s["b"]


async def test_arun_returns_the_state(scripted):
    state = await two.arun("w", backend=scripted({"a": "1", "b": "2"}))
    assert state.ret_value == "12"
    assert state.text() == "w1then2"


async def test_many_aruns_run_at_the_same_time(scripted):
    backend = scripted({"a": lambda _: "1", "b": lambda _: "2"}, delay=0.1)
    began = time.monotonic()
    states = await asyncio.gather(*(two.arun(f"{i}", backend=backend) for i in range(60)))
    assert time.monotonic() - began < 3
    assert [state.text() for state in states] == [f"{i}1then2" for i in range(60)]


async def test_the_loop_goes_on_meanwhile(scripted):
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.01)

    ticker = asyncio.create_task(tick())
    await two.arun("w", backend=scripted({"a": "1", "b": "2"}, delay=0.15))
    ticker.cancel()
    assert ticks > 10


async def test_cancelling_aborts_what_was_sent(scripted):
    backend = scripted({"a": "1", "b": "2"}, delay=30)
    task = asyncio.create_task(two.arun("w", backend=backend))
    await asyncio.sleep(0.2)
    assert backend.open_contexts == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for _ in range(500):
        if backend.open_contexts == 0:
            break
        await asyncio.sleep(0.01)
    assert backend.open_contexts == 0


async def test_a_timeout_of_the_caller_aborts(scripted):
    backend = scripted({"a": "1", "b": "2"}, delay=30)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(two.arun("w", backend=backend), 0.2)
    with pytest.raises(rt.BackendError, match=r"0\.1 s"):
        await two.arun("w", backend=backend, timeout=0.1)


async def test_errors_of_the_function_are_raised(scripted):
    @rt.function
    def f(s):
        s += rt.gen("a")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await f.arun(backend=scripted({"a": "1"}))


async def test_async_streaming(scripted):
    state = await two.arun("w", backend=scripted({"a": "x y z", "b": "2"}), stream=True)
    pieces = [piece async for piece in state.text_async_iter()]
    assert "".join(pieces) == "wx y zthen2" == state.text()
    assert [p async for p in state.text_async_iter("a")] == ["x", " y", " z"]
    pairs = [pair async for pair in state.text_async_iter("a", return_meta_data=True)]
    assert "".join(text for text, _ in pairs) == "x y z"
    assert all(isinstance(meta, dict) for _, meta in pairs)
    events = [event async for event in state.async_events()]
    assert "".join(event.delta for event in events) == state.text()


async def test_compiled_programs_run_async(scripted):
    @rt.function
    def f(s, word):
        s += word + rt.gen("a")

    compiled = f.compile()
    state = await compiled.arun("w", backend=scripted({"a": "1"}))
    assert state.text() == "w1"
    backend = scripted({"a": "1"}, delay=30)
    task = asyncio.create_task(compiled.arun("w", backend=backend))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
