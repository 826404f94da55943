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


class Awake:
    """Keeps the running asyncio loop from sleeping for ``seconds`` after each `touch`."""

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._until = 0.0
        self._turning = False

    def touch(self) -> None:
        """Something came, or was sent that will be answered."""
        if self._seconds > 0:
            self._until = time.monotonic() + self._seconds
            if not self._turning:
                self._turning = True
                self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """A loop with something to call does not wait for its descriptors, it only looks."""
        if time.monotonic() < self._until:
            self._loop.call_soon(self._turn)
        else:
            self._turning = False
