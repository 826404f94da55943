"""Starting work at once: up to where it first waits, in the caller, and only then as a task."""

from __future__ import annotations

import asyncio
import contextvars
import types
from collections.abc import Coroutine, Generator
from typing import Any


def begin(work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Run ``work`` to its end or first wait; the task that goes on from there, if it waits. It has
    the caller's context, and until then no task of its own. Raises what it raises before that."""
    context = contextvars.copy_context()
    try:
        awaited = context.run(work.send, None)
    except StopIteration:
        return None
    task = asyncio.get_running_loop().create_task(_rest(work, awaited), context=context)
    # Cancelled before its first step, it does not get to throw that into the work.
    task.add_done_callback(lambda _: work.close())
    return task


async def _rest(work: Coroutine[Any, Any, None], awaited: Any) -> None:
    await _resume(work, awaited)


@types.coroutine
def _resume(work: Coroutine[Any, Any, None], awaited: Any) -> Generator[Any, Any, None]:
    """Wait for what ``work`` waits for already, then drive it on."""
    while True:
        try:
            sent = yield awaited
        except BaseException as error:
            step, argument = work.throw, error
        else:
            step, argument = work.send, sent
        try:
            awaited = step(argument)
        except StopIteration:
            return
