"""Who computes first where there is more to do than cores, as far as the system lets one say."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def go_last(pid: int) -> None:
    """Let a process, 0 for this one, compute only while nobody else wants to. Not to be undone by
    it."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, pid, 19)
        os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))


def computed(pid: int) -> float | None:
    """Seconds that a process of one thread has computed; None where nobody says."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    except (OSError, ValueError, IndexError):
        return None
