"""Whether, and for how long, a process may stay awake for a message that may come at once.

Who has slept wakes late, with cold caches and a slow clock, at the cost of a short prompt's first
token. So where there are cores to spare, whoever heard something looks for more for a moment.
"""

from __future__ import annotations

import asyncio
import os
import time
from functools import cache
from pathlib import Path

SPIN_CORES = 8
"""Cores from which on some may be spent so."""
SPIN_SECONDS = 0.005
"""How long after a message."""
STEADY_SECONDS = 0.04
"""How long where messages came one after the other, each within as long of the one before: a
client that sends a request as soon as it has read an answer, or every few milliseconds."""
_QUOTA = "/sys/fs/cgroup/cpu.max"
_QUOTA_V1 = "/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"


@cache
def spin_seconds() -> float:
    """How long this process may look for the next message, awake: `SPIN_SECONDS` where it has the
    cores, and no quota of its container says otherwise; else 0."""
    cores = min(float(len(os.sched_getaffinity(0))), _quota())
    return SPIN_SECONDS if cores >= SPIN_CORES else 0.0


def _quota() -> float:
    """How many cores' time the container may use."""
    quota = _words(_QUOTA) or [word for path in _QUOTA_V1 for word in _words(path)]
    try:
        used, period = map(float, quota)
        return used / period if used > 0 and period > 0 else float("inf")
    except ValueError:  # "max", or no container
        return float("inf")


def _words(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError):
        return []


class Patience:
    """How long whoever hears messages stays awake for the next one."""

    def __init__(self, seconds: float) -> None:
        """``seconds``: after a message by itself; 0: never, also where they are steady."""
        self._seconds = seconds
        self._steady = max(seconds, STEADY_SECONDS)
        self._heard = float("-inf")
        self.until = float("-inf")
        """On the monotonic clock, when to give up."""

    def heard(self) -> None:
        """Something came, or was sent that will be answered."""
        if self._seconds > 0:
            now = time.monotonic()
            steady = now - self._heard <= self._steady
            self._heard = now
            self.until = now + (self._steady if steady else self._seconds)


class Awake:
    """Keeps the running asyncio loop from sleeping for a while after each `touch`."""

    def __init__(self, seconds: float) -> None:
        """``seconds``: see `Patience`."""
        self._loop = asyncio.get_running_loop()
        self._patience = Patience(seconds)
        self._turning = False

    def touch(self) -> None:
        """Something came, or was sent that will be answered."""
        self._patience.heard()
        if not self._turning and self._patience.until > time.monotonic():
            self._turning = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """A loop with something to call does not wait for its descriptors, it only looks."""
        if time.monotonic() < self._patience.until:
            self._loop.call_soon(self._turn)
        else:
            self._turning = False
