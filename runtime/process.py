"""One child process, as its launcher sees it."""

from __future__ import annotations

import collections
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

import msgspec

from .child import PARENT_VARIABLE
from .protocol.errors import ErrorInfo

Word = tuple["Child", str, Any]
"""(child, "stage" | "ready" | "error" | "exit", what it said)"""

_TAIL_LINES = 30


class Child:
    """Runs ``python -m MODULE ARGS…``. What it says on stdout arrives in ``words``, each line of
    its stderr in ``log`` (child's name, line). The thread that makes a `Child` must outlive it:
    where the kernel ends children with their parent, it means the thread.
    """

    def __init__(
        self,
        name: str,
        module: str,
        args: Sequence[str],
        *,
        words: queue.Queue[Word],
        log: Callable[[str, str], None],
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.error: ErrorInfo | None = None
        self.tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self._words = words
        self._log = log
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, **(env or {}), PARENT_VARIABLE: str(os.getpid())},
            process_group=0,  # a terminal's Ctrl-C is the launcher's to handle
        )
        self._readers = [
            threading.Thread(target=reader, args=(pipe,), daemon=True, name=f"ramet-{name}-{kind}")
            for reader, pipe, kind in (
                (self._read_words, self._process.stdout, "words"),
                (self._read_log, self._process.stderr, "log"),
            )
        ]
        for thread in self._readers:
            thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def dead(self) -> ErrorInfo | None:
        """Why the process is gone, or None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        for thread in self._readers:  # its last words are in the pipes
            thread.join(timeout=1.0)
        if self.error is not None:
            return self.error
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"
        last = next((line for line in reversed(self.tail) if line.strip()), "")
        return ErrorInfo(
            "backend", f"the {self.name} {how}" + (f": {last.strip()}" if last else "")
        )

    def stop(self, grace: float) -> None:
        """SIGTERM, then SIGKILL after ``grace`` seconds. Returns when the process is gone."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=grace)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        for thread in self._readers:
            thread.join(timeout=1.0)

    def _read_words(self, pipe: IO[str]) -> None:
        with pipe:
            for line in pipe:
                self._hear(line)
        self._process.wait()
        self._words.put((self, "exit", self._process.returncode))

    def _hear(self, line: str) -> None:
        try:
            word = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError:
            self._log(self.name, line.rstrip("\n"))
            return
        if "error" in word:
            self.error = msgspec.convert(word["error"], ErrorInfo)
        elif word.get("ready"):
            self._words.put((self, "ready", word))
        elif "stage" in word:
            self._words.put((self, "stage", str(word["stage"])))

    def _read_log(self, pipe: IO[str]) -> None:
        with pipe:
            for line in pipe:
                self.tail.append(line.rstrip("\n"))
                self._log(self.name, line.rstrip("\n"))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
