"""Many runs of one program at a time."""

from __future__ import annotations

import asyncio
import contextvars
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ramet.runtime.protocol import BadInputError, RametError

from .arguments import Item
from .run import Run
from .state import State

if TYPE_CHECKING:
    from .function import Function

T = TypeVar("T")
Start = Callable[[dict[str, Any], dict[str, Any]], Run]


def threads_for(size: int, num_threads: int | Literal["auto"]) -> int:
    """How many programs of a batch run at a time."""
    if num_threads == "auto":
        return min(size, max(96, 16 * (os.cpu_count() or 1)))
    if isinstance(num_threads, bool) or num_threads < 1:
        raise BadInputError(
            f"num_threads must be 'auto' or at least 1, not {num_threads!r}", param="num_threads"
        )
    return min(size, num_threads)


def spawn(call: Callable[..., T], *args: Any) -> Future[T]:
    """Call in a daemon thread of its own, so that a run that hangs never holds up exit."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # a cancelled wait leaves it to run out
    context = contextvars.copy_context()

    def work() -> None:
        try:
            result = context.run(call, *args)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=work, name="ramet-program", daemon=True).start()
    return future


class _Batch:
    """Runs of a batch in threads that take one item after the other."""

    def __init__(self, function: Function, items: Sequence[Item], start: Start) -> None:
        self.function = function
        self.start = start
        self.results: list[Future[State]] = [Future() for _ in items]
        self.running: set[Run] = set()
        self.lock = threading.Lock()
        self.stopped = False
        self._todo: queue.SimpleQueue[tuple[int, Item]] = queue.SimpleQueue()
        for numbered in enumerate(items):
            self._todo.put(numbered)

    def work(self) -> None:
        """Take items until there are none."""
        while True:
            try:
                index, (arguments, sampling) = self._todo.get_nowait()
            except queue.Empty:
                return
            future = self.results[index]
            try:
                future.set_result(self.one(arguments, sampling))
            except BaseException as error:
                future.set_exception(error)

    def one(self, arguments: dict[str, Any], sampling: dict[str, Any]) -> State:
        """One run, to its end. An error of the runtime stays in the state."""
        run = self.start(arguments, sampling)
        with self.lock:
            self.running.add(run)
            stopped = self.stopped
        try:
            if stopped:
                run.abort()
            return self.function.finish(run, arguments)
        except RametError as error:
            if run.failure is None and run.store.fatal is None:
                raise
            del error
            return State(run, run.root)
        finally:
            with self.lock:
                self.running.discard(run)

    def stop(self) -> None:
        """Abort what runs; what has not begun never will."""
        with self.lock:
            self.stopped = True
            running = list(self.running)
        while not self._todo.empty():
            try:
                self._todo.get_nowait()
            except queue.Empty:
                break
        for run in running:
            run.abort()


def run_all(
    function: Function,
    items: Sequence[Item],
    start: Start,
    num_threads: int | Literal["auto"],
    progress_bar: bool,
) -> Iterator[State]:
    """States in the order of the items. Started at once, not at the first ``next``."""
    count = threads_for(len(items), num_threads)
    batch = _Batch(function, items, start)
    for _ in range(count):
        spawn(batch.work)
    return _collect(batch, progress_bar)


def _collect(batch: _Batch, progress_bar: bool) -> Iterator[State]:
    try:
        if progress_bar:
            _show_progress(batch.results)
        for future in batch.results:
            yield future.result()
    finally:
        batch.stop()


def _show_progress(futures: Sequence[Future[State]]) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    with Progress(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task("", total=len(futures))
        pending = set(futures)
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            progress.update(task, advance=len(done))
            if any(future.exception() is not None for future in done):
                return


async def run_all_async(
    function: Function,
    items: Sequence[Item],
    start: Start,
    num_threads: int | Literal["auto"],
) -> list[State]:
    """As `run_all`, for asyncio; a cancelled wait aborts the batch."""
    count = threads_for(len(items), num_threads)
    batch = _Batch(function, items, start)
    for _ in range(count):
        spawn(batch.work)
    try:
        return [await asyncio.wrap_future(future) for future in batch.results]
    finally:
        batch.stop()


async def settled(run: Run) -> None:
    """Wait for a run that is all sent; a cancelled wait aborts it."""
    try:
        await run.settle_async()
    except asyncio.CancelledError:
        run.abort()
        raise
