"""Many runs of one program at a time."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
import queue
import reprlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ramet.runtime.protocol import BadInputError, RametError

from .arguments import Item
from .backends.base import Backend
from .run import Run
from .state import State

if TYPE_CHECKING:
    from .function import Function

T = TypeVar("T")
Start = Callable[[dict[str, Any], dict[str, Any]], Run]

_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 80


def threads_for(size: int, num_threads: int | Literal["auto"]) -> int:
    """How many functions of a batch run at a time."""
    if num_threads == "auto":
        return min(size, max(96, 16 * (os.cpu_count() or 1)))
    if isinstance(num_threads, (bool, str, float)) or num_threads < 1:
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
    """Runs of a batch. Threads take one item after the other; a program whose function has
    returned needs none while it runs on."""

    def __init__(
        self, function: Function, items: Sequence[Item], start: Start, threads: int, in_flight: int
    ) -> None:
        self.function = function
        self.start = start
        self.results: list[Future[State]] = [Future() for _ in items]
        self.running: set[Run] = set()
        self.lock = threading.Lock()
        self.stopped = False
        self._slots = threading.BoundedSemaphore(max(1, in_flight))
        self._todo: queue.SimpleQueue[tuple[int, Item]] = queue.SimpleQueue()
        for numbered in enumerate(items):
            self._todo.put(numbered)
        for future in self.results:
            future.set_running_or_notify_cancel()  # a cancelled wait leaves it to be set
        for _ in range(threads):
            spawn(self._work)

    def _work(self) -> None:
        while True:
            self._slots.acquire()
            try:
                index, (arguments, sampling) = self._todo.get_nowait()
            except queue.Empty:
                self._slots.release()
                return
            future = self.results[index]
            try:
                run = self._one(arguments, sampling)
            except BaseException as error:
                self._slots.release()
                error.add_note(f"item {index} of the batch, arguments {_shown.repr(arguments)}")
                future.set_exception(error)
            else:
                run.store.when_done(functools.partial(self._over, run, future))

    def _one(self, arguments: dict[str, Any], sampling: dict[str, Any]) -> Run:
        """Start a run and have its function run. An error of the runtime stays in the state."""
        run = self.start(arguments, sampling)
        with self.lock:
            self.running.add(run)
            stopped = self.stopped
        if stopped:
            run.abort()
        try:
            self.function.drive(run, arguments)
        except RametError:
            if not run.failed_by_runtime:
                raise
        return run

    def _over(self, run: Run, future: Future[State]) -> None:
        self._slots.release()
        with self.lock:
            self.running.discard(run)
        run.stop_timer()
        future.set_result(State(run, run.root))

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
    backend: Backend,
    num_threads: int | Literal["auto"],
    progress_bar: bool,
) -> Iterator[State]:
    """States in the order of the items. Started at once, not at the first ``next``."""
    return _collect(_begin(function, items, start, backend, num_threads), progress_bar)


def _begin(
    function: Function,
    items: Sequence[Item],
    start: Start,
    backend: Backend,
    num_threads: int | Literal["auto"],
) -> _Batch:
    threads = threads_for(len(items), num_threads)
    in_flight = max(threads, backend.max_in_flight) if num_threads == "auto" else threads
    return _Batch(function, items, start, threads, in_flight)


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
    backend: Backend,
    num_threads: int | Literal["auto"],
) -> list[State]:
    """As `run_all`, for asyncio; a cancelled wait aborts the batch."""
    batch = _begin(function, items, start, backend, num_threads)
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
