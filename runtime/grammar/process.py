"""Processes that try specs, as their compiler sees them: one for each try, killed when late."""

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
_REPLY_BYTES = 1 << 30
_QUIET = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}


class Workers:
    """A server process, started by the first question, that forks one for each try. Thread-safe.
    ``background``: tries make way for all else that computes."""

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
        self._spare: dict[str, socket.socket] = {}
        """To a process forked ahead, for each library that was asked for."""

    def pids(self) -> list[int]:
        """Of the server, where it runs, then of the tries that go on."""
        server = self._server
        return [*([] if server is None else [server.pid]), *self._tries]

    def ask(self, backend: str, spec: Spec, until: float) -> Reply:
        """Try a spec until that time. Raises `TimeoutError`, or `WorkerDied` where it needs too
        much memory; both leave no process behind. `BackendError` if none can be started."""
        try:
            try:
                return self._ask(backend, spec, until)
            except WorkerDied:
                if not self._lost_server():  # then it is the try's own fault
                    raise
                return self._ask(backend, spec, until)
        finally:
            self._fork_ahead(backend)

    def _ask(self, backend: str, spec: Spec, until: float) -> Reply:
        if not self._background:
            with self._begin(backend, spec, last=False) as only:
                return only.reply(until)
        with self._begin(backend, spec, last=True) as first:
            first.wait(min(time.monotonic() + PATIENCE_SECONDS, until))
            if first.answers or not first.starves:
                return first.reply(until)
        with self._begin(backend, spec, last=False) as again:
            again.wait(min(time.monotonic() + TURN_SECONDS, until))
            if not again.answers:
                go_last(again.pid)
            return again.reply(until)

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
        for _ in range(_STARTS):
            with self._lock:
                line = self._spare.pop(backend, None)
            line = line or self._line(backend)
            try:
                born = read_frame(
                    line.fileno(), Born, limit=64, until=time.monotonic() + START_SECONDS
                )
                write_frame(line.fileno(), job)
                return _Try(born.pid, line, self._tries)
            except (TimeoutError, WorkerDied):
                line.close()  # the server died, or somebody killed this one: once more
        raise BackendError("a process that compiles grammars could not be started")

    def _lost_server(self) -> bool:
        """Whether there is no server any more, though nobody closed it."""
        with self._lock:
            if self._server is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._server.wait(0.05)  # its tries end a moment before it is gone
                    self._kill()
            return self._server is None and not self._closed

    def _fork_ahead(self, backend: str) -> None:
        """Have a process ready for the next who asks: a fork takes as long as many a try."""
        with contextlib.suppress(WorkerDied, BackendError):
            line = self._line(backend)
            with self._lock:
                if not self._closed and backend not in self._spare:
                    self._spare[backend] = line
                    return
            line.close()

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
        for line in self._spare.values():
            line.close()
        self._spare.clear()
        if control is not None:
            control.close()
        if server is not None:
            server.kill()
            server.wait()


class _Try:
    """One process that tries one spec. Leaving it as a context ends it."""

    def __init__(self, pid: int, line: socket.socket, among: set[int]) -> None:
        self.pid = pid
        self.answers = False
        """Whether there is an answer, or will never be one."""
        self._line = line
        self._among = among
        self._done = False
        among.add(pid)

    def __enter__(self) -> _Try:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._done:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._among.discard(self.pid)
        self._line.close()

    @property
    def starves(self) -> bool:
        """Whether it was hardly let compute for as long as one is patient."""
        seconds = computed(self.pid)
        return seconds is not None and seconds < FAIR_SHARE * PATIENCE_SECONDS

    def wait(self, until: float) -> None:
        """Until then, or an answer."""
        poll = select.poll()  # select.select fails on descriptors above 1023
        poll.register(self._line.fileno(), select.POLLIN)
        self.answers = bool(poll.poll(max(until - time.monotonic(), 0.0) * 1000))

    def reply(self, until: float) -> Reply:
        """Raises `TimeoutError`, `WorkerDied`."""
        reply = read_frame(self._line.fileno(), Reply, limit=_REPLY_BYTES, until=until)
        self._done = True
        return reply
