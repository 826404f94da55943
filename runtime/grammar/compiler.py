"""Specs to grammars beside the work that goes on: in worker processes, once a spec, remembered."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque

from ..protocol.errors import AbortedError, BackendError, GrammarError, RametError
from .backend import Backend, Refused
from .cache import GrammarCache
from .frames import Reply, WorkerDied
from .matcher import Grammar
from .pending import Flight, Pending
from .process import WorkerProcess
from .routing import make_backend, route
from .spec import Spec
from .vocabulary import Vocabulary

log = logging.getLogger(__name__)

IDLE_SECONDS = 60.0
_FIRST_SHARE = 0.3
_WAIT_DEADLINES = 3.0
_CLOSED = "the compiler of grammars was closed"


class Compiler:
    """Thread-safe. Each of up to ``workers`` threads drives one worker process, started when there
    is work for it; both end when idle for a minute, but for one.

    ``deadline``: seconds a spec may take once begun; its process is then killed. ``memory_limit``:
    bytes of address space of a worker. ``cache_bytes``: bound of the grammars that are remembered.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        backend: str = "auto",
        *,
        deadline: float = 10.0,
        memory_limit: int = 2 << 30,
        cache_bytes: int = 256 << 20,
        workers: int = 4,
    ) -> None:
        route("regex", backend)  # raises for an unknown name
        self.vocabulary = vocabulary
        self._pinned = backend
        self._deadline = deadline
        self._memory_limit = memory_limit
        self._max_threads = workers
        self._cache = GrammarCache(cache_bytes)
        self._flights: dict[str, Flight] = {}
        self._queue: deque[Flight] = deque()
        self._changed = threading.Condition()
        self._threads: dict[threading.Thread, WorkerProcess] = {}
        self._idle = 0
        self._closed = False
        self._backends: dict[str, Backend] = {}
        self._making = threading.Lock()
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_out, False)
        os.set_blocking(self._wake_in, False)
        self.compiled = self.failed = self.hits = 0

    def submit(self, spec: Spec, deadline: float | None = None) -> Pending:
        """Ask for a grammar; returns at once. Raises `BackendError` after `close`."""
        with self._changed:
            if self._closed:
                raise BackendError("the compiler of grammars is closed")
            flight = self._flights.get(spec.key)
            if flight is not None:
                return Pending(flight)
            flight = Flight(spec, deadline or self._deadline)
            pending = Pending(flight)
            match self._cache.find(spec.key):
                case None:
                    self._flights[spec.key] = flight
                    self._queue.append(flight)
                    self._wake_worker()
                case GrammarError() as error:
                    flight.land(error=error)
                case grammar:
                    self.hits += 1
                    flight.land(grammar)
            return pending

    def fileno(self) -> int:
        """A descriptor that becomes readable when a compilation ends; `drain` it then."""
        return self._wake_out

    def drain(self) -> None:
        """Make the descriptor unreadable until the next compilation ends."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_out, 4096):
                pass

    def close(self) -> None:
        """Kill the workers; what is not done ends with an `AbortedError`."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            threads = dict(self._threads)
            self._changed.notify_all()
        for process in threads.values():
            process.stop()
        for thread in threads:
            thread.join(timeout=5.0)
        with self._changed:
            for flight in self._flights.values():
                flight.land(error=AbortedError(_CLOSED))
            self._flights.clear()
        os.close(self._wake_in)
        os.close(self._wake_out)

    # --- threads ----------------------------------------------------------------------------------

    def _wake_worker(self) -> None:
        self._changed.notify()
        if self._idle < len(self._queue) and len(self._threads) < self._max_threads:
            process = WorkerProcess(self.vocabulary, self._memory_limit)
            thread = threading.Thread(target=self._work, args=(process,), daemon=True)
            thread.name = f"ramet-grammar-{len(self._threads)}"
            self._threads[thread] = process
            thread.start()

    def _work(self, process: WorkerProcess) -> None:
        try:
            while (flight := self._next()) is not None:
                self._fly(flight, process)
        finally:
            with self._changed:
                self._threads.pop(threading.current_thread(), None)
            process.kill()

    def _next(self) -> Flight | None:
        """The next that anyone waits for; None when this thread is not needed."""
        with self._changed:
            while not self._closed:
                while self._queue:
                    flight = self._queue.popleft()
                    if flight.waiting > 0:
                        return flight
                    del self._flights[flight.spec.key]
                    flight.land(error=AbortedError("nobody waited for this grammar"))
                self._idle += 1
                called = self._changed.wait(IDLE_SECONDS)
                self._idle -= 1
                if not called and not self._queue and len(self._threads) > 1:
                    return None
            return None

    def _fly(self, flight: Flight, process: WorkerProcess) -> None:
        grammar = None
        error: RametError | None = None
        for_good = True
        try:
            if time.monotonic() - flight.submitted > _WAIT_DEADLINES * flight.seconds:
                raise BackendError("too many grammars wait to be compiled; try again later")
            grammar = self._compile(flight, process)
        except _LateError as late:
            error, for_good = late, False
        except RametError as known:
            error = known
        except Exception as unknown:
            log.exception("compiling a %s failed", flight.spec.kind)
            error = BackendError(f"compiling failed: {type(unknown).__name__}")
        with self._changed:
            if self._closed:
                return
            if grammar is not None:
                self.compiled += 1
                self._cache.keep(flight.spec.key, grammar)
            else:
                self.failed += 1
                if isinstance(error, GrammarError):
                    self._cache.refuse(flight.spec.key, error, for_good=for_good)
            del self._flights[flight.spec.key]
            flight.land(grammar, error)
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake_in, b"!")

    # --- one compilation --------------------------------------------------------------------------

    def _compile(self, flight: Flight, process: WorkerProcess) -> Grammar:
        """Along the route: a backend that refuses, or takes too long, makes way for the next;
        an error of the spec itself ends it."""
        left = flight.seconds
        refusals: list[str] = []
        spec = flight.spec
        names = route(spec.kind, self._pinned, prefixed=bool(spec.prefix))
        for i, name in enumerate(names):
            last = i + 1 == len(names)
            share = left if last else left * _FIRST_SHARE
            begun = time.monotonic()
            try:
                reply = self._ask(process, name, spec, share)
                if reply.error is not None:
                    raise reply.error.exception()
                if reply.refused is None:
                    return self._backend(name).finish(spec, self.vocabulary, reply.data)
                refusals.append(f"{name}: {reply.refused}")
            except Refused as refusal:
                refusals.append(f"{name}: {refusal}")
            except _LateError:
                if last:
                    raise
            left -= time.monotonic() - begun
        raise GrammarError(f"no backend takes this {spec.kind} ({'; '.join(refusals)})")

    def _ask(self, process: WorkerProcess, name: str, spec: Spec, seconds: float) -> Reply:
        if self._closed:
            raise AbortedError(_CLOSED)
        try:
            return process.ask(name, spec, seconds)
        except TimeoutError:
            raise _LateError(
                f"the {spec.kind} is too complex: compiling it took over {seconds:.3g} s"
            ) from None
        except WorkerDied:
            if self._closed:
                raise AbortedError(_CLOSED) from None
            megabytes = self._memory_limit >> 20
            raise _LateError(
                f"the {spec.kind} is too complex: compiling it takes over {megabytes} MiB"
            ) from None

    def _backend(self, name: str) -> Backend:
        with self._making:
            found = self._backends.get(name)
            if found is None:
                found = self._backends[name] = make_backend(name)
            return found


class _LateError(GrammarError):
    """A limit of time or memory was met."""
