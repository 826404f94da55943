"""Who makes way for a request that is far more urgent and cannot be taken in."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .classes import PriorityClass
from .request import Request
from .rows import EMPTY, Rows
from .siblings import Siblings
from .waiting import Waiting

STEPS = 10
"""Steps of priority between two requests of which one makes way for the other."""


class Preemption:
    """Looks, before a step is planned, whether the step before left an urgent request waiting for
    want of a row or of KV."""

    def __init__(
        self,
        rows: Rows,
        waiting: Waiting,
        siblings: Siblings,
        classes: Mapping[str, PriorityClass],
    ) -> None:
        self._rows = rows
        self._waiting = waiting
        self._siblings = siblings
        self._bounds = {
            name: cls.max_running for name, cls in classes.items() if cls.max_running is not None
        }
        self.refused: Request | None = None
        """For which there was no KV."""

    def room(self) -> dict[str, int]:
        """How many more of each class may run, of classes that are bounded."""
        room = dict(self._bounds)
        for request in self._rows.requests if room else ():
            if request is not None and request.cls in room:
                room[request.cls] -= 1
        return room

    def victim(self) -> int | None:
        """The row to be sent back now, if any: of the least urgent, that with least done. What a
        request waited before it was admitted counts for it, so that it is not sent back again and
        again."""
        rows = self._rows
        if not self._waiting or not rows.running:
            return None
        running = np.flatnonzero(rows.state != EMPTY)
        claims = rows.claim[running]
        worst = int(claims.max())
        if worst < self._waiting.most_urgent + STEPS:
            return None
        request = self.refused
        if request is None and not rows.has_room:
            request = self._without_row(worst - STEPS)
        if request is None or worst < request.level + STEPS:
            return None
        by = -rows.serial[running], rows.sampled[running], -claims
        return int(running[np.lexsort(by)[0]])

    def least_urgent(self) -> int:
        """The row of the least urgent running request; of several, of that with least done."""
        rows = self._rows
        running = np.flatnonzero(rows.state != EMPTY)
        by = -rows.serial[running], rows.sampled[running], -rows.level[running]
        return int(running[np.lexsort(by)[0]])

    def _without_row(self, level: int) -> Request | None:
        """One of this level at most that would run if there were a row."""
        room = self.room()
        for request in self._waiting:
            if (
                request.level <= level
                and room.get(request.cls, 1) > 0
                and not self._siblings.must_wait(request)
            ):
                return request
        return None
