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
from .process import Workers
from .routing import make_backend, route
from .spec import Spec
from .vocabulary import Vocabulary

log = logging.getLogger(__name__)

IDLE_SECONDS = 60.0
_FIRST_SHARE = 0.3
_LEAST_SECONDS = 2.0
_WAIT_DEADLINES = 3.0
_CLOSED = "the compiler of grammars was closed"


class Compiler:
    """Thread-safe. Up to ``workers`` specs are tried at once, each in a process of its own.

    ``deadline``: seconds after which a spec that was asked for fails; its process is then killed.
    ``memory_limit``: bytes of address space of a worker. ``cache_bytes``: bound of the grammars
    that are remembered. ``background``: tries make way for all else that computes.
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
        background: bool = True,
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
        self._threads: set[threading.Thread] = set()
        self._workers = Workers(vocabulary, memory_limit, background=background)
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
            threads = list(self._threads)
            self._changed.notify_all()
        self._workers.close()
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
            thread = threading.Thread(target=self._work, daemon=True)
            thread.name = f"ramet-grammar-{len(self._threads)}"
            self._threads.add(thread)
            thread.start()

    def _work(self) -> None:
        try:
            while (flight := self._next()) is not None:
                self._fly(flight)
        finally:
            with self._changed:
                self._threads.discard(threading.current_thread())
                idle = not self._threads
            if idle:
                self._workers.rest()

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
                if not called and not self._queue:
                    return None
            return None

    def _fly(self, flight: Flight) -> None:
        grammar = None
        error: RametError | None = None
        for_good = True
        try:
            if time.monotonic() - flight.submitted > _WAIT_DEADLINES * flight.seconds:
                raise BackendError("too many grammars wait to be compiled; try again later")
            grammar = self._compile(flight)
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

    def _compile(self, flight: Flight) -> Grammar:
        """Along the route: a backend that refuses, or takes too long, makes way for the next;
        an error of the spec itself ends it."""
        spec, refusals = flight.spec, []
        # The time runs from when it was asked for. One that waited for long still gets a moment:
        # most need no more.
        until, least = flight.submitted + flight.seconds, min(_LEAST_SECONDS, flight.seconds)
        names = route(spec.kind, self._pinned, prefixed=bool(spec.prefix))
        for i, name in enumerate(names):
            last = i + 1 == len(names)
            now, share = time.monotonic(), 1.0 if last else _FIRST_SHARE
            try:
                reply = self._ask(name, flight, now + (until - now) * share, least * share)
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
        raise GrammarError(f"no backend takes this {spec.kind} ({'; '.join(refusals)})")

    def _ask(self, name: str, flight: Flight, until: float, least: float) -> Reply:
        if self._closed:
            raise AbortedError(_CLOSED)
        try:
            return self._workers.ask(name, flight.spec, until, least)
        except TimeoutError:
            raise _LateError(
                f"the {flight.spec.kind} is too complex: it was not compiled within "
                f"{flight.seconds:.3g} s"
            ) from None
        except WorkerDied:
            if self._closed:
                raise AbortedError(_CLOSED) from None
            raise _LateError(
                f"the {flight.spec.kind} is too complex: compiling it takes over "
                f"{self._memory_limit >> 20} MiB"
            ) from None

    def _backend(self, name: str) -> Backend:
        with self._making:
            found = self._backends.get(name)
            if found is None:
                found = self._backends[name] = make_backend(name)
            return found


class _LateError(GrammarError):
    """A limit of time or memory was met."""
