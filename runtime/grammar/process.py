"""One worker process as its compiler sees it: asked one thing at a time, killed when late."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from ..child import PARENT_VARIABLE
from ..protocol.errors import BackendError
from .frames import Hello, Job, Reply, WorkerDied, read_frame, write_frame
from .spec import Spec
from .vocabulary import Vocabulary

START_SECONDS = 60.0
_STARTS = 2
_REPLY_BYTES = 1 << 30
_QUIET = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}


class WorkerProcess:
    """Starts with its first question. The thread that makes it must outlive it: where the kernel
    ends children with their parent, it means the thread."""

    def __init__(self, vocabulary: Vocabulary, memory_limit: int) -> None:
        self._vocabulary = vocabulary
        self._memory_limit = memory_limit
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, backend: str, spec: Spec, seconds: float) -> Reply:
        """Try a spec. Raises `TimeoutError`, or `WorkerDied` where it needs too much memory; both
        leave no process behind. `BackendError` if none can be started."""
        if self._process is not None and self._process.poll() is not None:
            self.kill()  # it died between two questions
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            job = Job(backend, spec.kind, spec.text, spec.whitespace, spec.prefix)
            write_frame(process.stdin.fileno(), job)
            until = time.monotonic() + seconds
            return read_frame(process.stdout.fileno(), Reply, limit=_REPLY_BYTES, until=until)
        except (TimeoutError, WorkerDied):
            self.kill()
            raise

    def stop(self) -> None:
        """From any thread: the process dies, and who waits for its answer gets `WorkerDied`."""
        process = self._process
        if process is not None:
            process.kill()

    def kill(self) -> None:
        """By the thread that asks: the process is gone; the next question starts another."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def _start(self) -> subprocess.Popen[bytes]:
        for _ in range(_STARTS):
            process = self._process = self._launch()
            assert process.stdin is not None
            assert process.stdout is not None
            words = self._vocabulary
            try:
                hello = Hello(words.tokens, words.size, words.eos_ids)
                write_frame(process.stdin.fileno(), hello)
                until = time.monotonic() + START_SECONDS
                read_frame(process.stdout.fileno(), Reply, limit=_REPLY_BYTES, until=until)
                return process
            except (TimeoutError, WorkerDied):
                self.kill()
        raise BackendError("a process that compiles grammars could not be started")

    def _launch(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "ramet.runtime.grammar.worker"),
                *("--memory", str(self._memory_limit)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={**os.environ, **_QUIET, PARENT_VARIABLE: str(os.getpid())},
            process_group=0,  # a terminal's Ctrl-C is not meant for it
        )
