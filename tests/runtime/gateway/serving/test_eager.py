"""Work that begins in its caller and goes on as a task."""

from __future__ import annotations

import asyncio
import contextvars

import pytest
from ramet.runtime.gateway.eager import begin

whose: contextvars.ContextVar[str] = contextvars.ContextVar("whose", default="nobody")


async def test_what_never_waits_is_over_at_once():
    done = []

    async def work() -> None:
        done.append(1)

    assert begin(work()) is None
    assert done == [1]


async def test_it_goes_on_where_it_waited_with_what_came():
    loop = asyncio.get_running_loop()
    first, second = loop.create_future(), loop.create_future()
    seen = []

    async def work() -> None:
        seen.append("began")
        seen.append(await first)
        await asyncio.sleep(0)
        seen.append(await second)

    task = begin(work())
    assert seen == ["began"]
    first.set_result("one")
    second.set_result("two")
    await task
    assert seen == ["began", "one", "two"]


async def test_errors_come_where_they_belong():
    async def at_once() -> None:
        raise ValueError("early")

    with pytest.raises(ValueError, match="early"):
        begin(at_once())
    future = asyncio.get_running_loop().create_future()
    caught = []

    async def later() -> None:
        try:
            await future
        except KeyError as error:
            caught.append(error)
        raise ValueError("late")

    task = begin(later())
    future.set_exception(KeyError("k"))
    with pytest.raises(ValueError, match="late"):
        await task
    assert len(caught) == 1


@pytest.mark.parametrize("turns", [0, 1, 3])
async def test_cancelled_it_cleans_up_however_early(turns):
    cleaned = []

    async def work() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            cleaned.append(1)

    held = work()  # so that it is not its end as garbage that cleans up
    task = begin(held)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert cleaned == [1]


async def test_a_cancelled_wait_may_be_survived():
    async def work() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0)

    task = begin(work())
    await asyncio.sleep(0)
    task.cancel()
    await task
    assert not task.cancelled()


async def test_its_context_is_a_copy_of_the_callers():
    seen = []

    async def work() -> None:
        seen.append(whose.get())
        whose.set("the work's")
        await asyncio.sleep(0)
        seen.append(whose.get())

    token = whose.set("the caller's")
    task = begin(work())
    assert whose.get() == "the caller's"
    whose.reset(token)
    await task
    assert seen == ["the caller's", "the work's"]
