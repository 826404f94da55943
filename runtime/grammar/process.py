"""Processes that try specs, as their compiler sees them: asked one at a time, killed when late."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

from ..protocol.errors import BackendError
from .frames import Born, Hello, Job, Reply, WorkerDied, read_frame, write_frame
from .priority import computed, go_last
from .routing import BACKENDS
from .spec import Spec
from .vocabulary import Vocabulary

START_SECONDS = 60.0
PATIENCE_SECONDS, FAIR_SHARE = 0.1, 0.1
"""A try goes last at first, so that nobody is held up. If it was let compute for less than that
share of that time, others want all that the machine has, and it would never end: then it begins
again with its turns among them, ..."""
TURN_SECONDS = 2.0
"""... for so long."""
_STARTS = 2
_MOST_IDLE = 2
"""Processes that are kept for the next who asks, for each library."""
_GONE_SECONDS = 0.5
"""A server's tries end with it, a moment before one can tell that it has ended."""
_REPLY_BYTES = 1 << 30
_QUIET = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}


class Workers:
    """A server process, started by the first question, that forks others, which try specs until one
    of them takes too long. Thread-safe. ``background``: tries make way for all else that
    computes."""

    def __init__(
        self, vocabulary: Vocabulary, memory_limit: int, *, background: bool = True
    ) -> None:
        self._vocabulary = vocabulary
        self._memory_limit = memory_limit
        self._background = background
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closed = False
        self._tries: set[int] = set()
        self._idle: dict[str, list[_Child]] = {}
        """For each library. Where tries go last, these may have gone last before."""

    def pids(self) -> list[int]:
        """Of the server, where it runs, then of the tries that go on."""
        server = self._server
        return [*([] if server is None else [server.pid]), *self._tries]

    def ask(self, backend: str, spec: Spec, until: float, least: float = 0.0) -> Reply:
        """Try a spec until that time, but for ``least`` seconds once it has begun: that the server
        must be started first is no fault of it. Raises `TimeoutError`, or `WorkerDied` where it
        needs too much memory; both leave no process behind. `BackendError` if none can be
        started."""
        try:
            return self._ask(backend, spec, until, least)
        except WorkerDied:
            if not self._lost_server():  # then it is the try's own fault
                raise
            return self._ask(backend, spec, until, least)

    def _ask(self, backend: str, spec: Spec, until: float, least: float) -> Reply:
        if not self._background:
            with self._begin(backend, spec, last=False) as only:
                return only.reply(max(until, time.monotonic() + least))
        with self._begin(backend, spec, last=True) as first:
            until = max(until, time.monotonic() + least)
            first.wait(min(time.monotonic() + PATIENCE_SECONDS, until))
            if first.answers or not first.starves:
                return first.reply(until)
        with self._begin(backend, spec, last=False) as again:
            again.wait(min(time.monotonic() + TURN_SECONDS, until))
            if not again.answers:
                go_last(again.pid)
            return again.reply(until)

    def rest(self) -> None:
        """Nobody has asked for long: only the server stays."""
        with self._lock:
            self._dismiss()

    def close(self) -> None:
        """From any thread: all processes die; who waits for an answer gets `WorkerDied`."""
        self._closed = True
        server = self._server
        if server is not None:
            server.kill()  # before the lock, which who starts it holds
        with self._lock:
            self._kill()

    # --- processes --------------------------------------------------------------------------------

    def _begin(self, backend: str, spec: Spec, *, last: bool) -> _Try:
        job = Job(backend, spec.kind, spec.text, spec.whitespace, spec.prefix, last)
        starts = 0
        while starts < _STARTS:
            child = self._take(backend) if last or not self._background else None
            starts += child is None
            child = child or _Child(self._line(backend))
            server = self._server
            try:
                child.begin(job)
                return _Try(child, self._tries, partial(self._keep, backend, child))
            except WorkerDied:
                child.line.close()  # the server died, or somebody killed this one: once more
            except TimeoutError:
                child.line.close()
                self._replace(server)
        raise BackendError("a process that compiles grammars could not be started")

    def _take(self, backend: str) -> _Child | None:
        with self._lock:
            idle = self._idle.get(backend)
            return idle.pop() if idle else None

    def _keep(self, backend: str, child: _Child) -> None:
        with self._lock:
            idle = self._idle.setdefault(backend, [])
            if self._control is not None and len(idle) < _MOST_IDLE:
                idle.append(child)
                return
        child.line.close()

    def _replace(self, server: subprocess.Popen[bytes] | None) -> None:
        """It does not fork any more, though it lives: another one is asked from now on."""
        with self._lock:
            if self._server is server:
                self._kill()

    def _lost_server(self) -> bool:
        """Whether there is no server any more, though nobody closed it."""
        server = self._server
        if server is not None:
            try:
                server.wait(_GONE_SECONDS)
            except subprocess.TimeoutExpired:
                return False
            with self._lock:
                if self._server is server:
                    self._kill()
        return not self._closed

    def _line(self, backend: str) -> socket.socket:
        """A connection to a process that is being forked."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                with self._lock:
                    for _ in range(_STARTS):
                        with contextlib.suppress(OSError):
                            wanted = bytes((BACKENDS.index(backend),))
                            socket.send_fds(self._connected(), [wanted], [theirs.fileno()])
                            return ours
                        self._kill()
                raise BackendError("a process that compiles grammars could not be started")
            except BaseException:
                ours.close()
                raise

    def _connected(self) -> socket.socket:
        """The connection to the server, which is started where there is none."""
        if self._closed:
            raise WorkerDied
        if self._server is not None and self._server.poll() is not None:
            self._kill()
        if self._control is None:
            self._start()
        assert self._control is not None
        return self._control

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._server = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "ramet.runtime.grammar.worker"),
                    *("--memory", str(self._memory_limit)),
                ],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **_QUIET},
                process_group=0,  # a terminal's Ctrl-C is not meant for it
            )
        words = self._vocabulary
        try:
            hello = Hello(words.tokens, words.size, words.eos_ids)
            write_frame(self._control.fileno(), hello)
            until = time.monotonic() + START_SECONDS
            read_frame(self._control.fileno(), Reply, limit=64, until=until)
        except (TimeoutError, WorkerDied):
            self._kill()
            raise OSError("no answer") from None

    def _kill(self) -> None:
        """The server is gone, and with it all that it forked."""
        server, self._server = self._server, None
        control, self._control = self._control, None
        self._dismiss()
        if control is not None:
            control.close()
        if server is not None:
            server.kill()
            server.wait()

    def _dismiss(self) -> None:
        for child in [one for idle in self._idle.values() for one in idle]:
            child.line.close()
        self._idle.clear()


class _Child:
    """One process and the connection to it. ``pid`` is 0 until it has said something."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.pid = 0

    def begin(self, job: Job) -> None:
        """Give it something to try. Raises `TimeoutError`, `WorkerDied`."""
        if not self.pid:
            until = time.monotonic() + START_SECONDS
            self.pid = read_frame(self.line.fileno(), Born, limit=64, until=until).pid
        write_frame(self.line.fileno(), job)


class _Try:
    """One spec that a process tries. Leaving it as a context ends the process, but where it has
    answered and wants to go on: then it is ``kept``."""

    def __init__(self, child: _Child, among: set[int], kept: Callable[[], None]) -> None:
        self.pid = child.pid
        self.answers = False
        """Whether there is an answer, or will never be one."""
        self._line = child.line
        self._before = computed(self.pid) or 0.0
        self._among = among
        self._kept = kept
        self._stays = False
        among.add(self.pid)

    def __enter__(self) -> _Try:
        return self

    def __exit__(self, *_: object) -> None:
        self._among.discard(self.pid)
        if self._stays:
            self._kept()
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._line.close()

    @property
    def starves(self) -> bool:
        """Whether it was hardly let compute for as long as one is patient."""
        seconds = computed(self.pid)
        return seconds is not None and seconds - self._before < FAIR_SHARE * PATIENCE_SECONDS

    def wait(self, until: float) -> None:
        """Until then, or an answer."""
        poll = select.poll()  # select.select fails on descriptors above 1023
        poll.register(self._line.fileno(), select.POLLIN)
        self.answers = bool(poll.poll(max(until - time.monotonic(), 0.0) * 1000))

    def reply(self, until: float) -> Reply:
        """Raises `TimeoutError`, `WorkerDied`."""
        reply = read_frame(self._line.fileno(), Reply, limit=_REPLY_BYTES, until=until)
        self._stays = not reply.leaves
        return reply
