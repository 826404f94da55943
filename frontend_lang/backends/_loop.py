"""The one thread that does the language's input and output: an asyncio loop for every backend."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class _State:
    lock = threading.Lock()
    loop: asyncio.AbstractEventLoop | None = None
    thread: threading.Thread | None = None
    pid = 0


def io_loop() -> asyncio.AbstractEventLoop:
    """The loop, started when first asked for; anew in a forked child. It never holds up exit."""
    state = _State
    if state.loop is not None and state.pid == os.getpid():
        return state.loop
    with state.lock:
        if state.loop is None or state.pid != os.getpid():
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=_serve, args=(loop,), name="ramet-io", daemon=True)
            thread.start()
            state.loop, state.thread, state.pid = loop, thread, os.getpid()
        return state.loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()


def in_io_thread() -> bool:
    """Whether the caller runs in the loop's thread (and so must not wait for it)."""
    return threading.current_thread() is _State.thread


def soon(callback: Callable[..., object], *args: Any) -> None:
    """Call back in the loop."""
    io_loop().call_soon_threadsafe(callback, *args)


def submit(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a coroutine in the loop."""
    return asyncio.run_coroutine_threadsafe(coroutine, io_loop())


def run(coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
    """Run a coroutine in the loop and wait for it; an interrupted wait cancels it."""
    future = submit(coroutine)
    try:
        return future.result(timeout)
    except BaseException:
        future.cancel()
        raise
