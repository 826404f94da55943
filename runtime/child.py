"""What a child process of a launcher does first, and what it tells the launcher on its stdout.

A child prints one JSON object a line: ``{"stage": "weights"}`` for progress, ``{"ready": true, …}``
once, or ``{"error": …}`` (an `ErrorInfo`) before it exits with 1. Logs go to stderr.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
import time
from typing import Any

import msgspec

from .protocol.errors import ErrorInfo

PARENT_VARIABLE = "RAMET_PARENT_PID"
_PR_SET_PDEATHSIG = 1


def follow_parent() -> None:
    """Make this process die with the one that launched it, however that one dies. Call it before
    anything heavy is imported. Without a launcher it does nothing."""
    parent = int(os.environ.get(PARENT_VARIABLE, "0"))
    if parent:
        follow(parent)


def follow(parent: int) -> None:
    """Make this process die with its parent, given by its id."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it died before the signal was asked for
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def tell_stage(stage: str) -> None:
    """A start-up stage has begun."""
    _tell(stage=stage)


def tell_ready(**facts: Any) -> None:
    """The process serves. ``facts`` are plain data.

    What the start made is collected now and never looked at again: a collection that walks the
    libraries' million objects holds up every request for a tenth of a second.
    """
    gc.collect()
    gc.freeze()
    _tell(ready=True, **facts)


def tell_error(error: BaseException) -> None:
    """The process cannot start; it should exit with 1 after this."""
    _tell(error=ErrorInfo.of(error))


def _tell(**facts: Any) -> None:
    print(msgspec.json.encode(facts).decode(), flush=True)
