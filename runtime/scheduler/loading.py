"""Requests whose KV is on its way: from host memory to the device, or from disk to host memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..memory.block_chain import BLOCK
from ..memory.kv_memory import KVMemory, Load
from ..memory.page_pool import SlotArray
from ..memory.tiers import Fetch, Tiers
from .batch import StepBatch
from .request import Request
from .waiting import Waiting

log = logging.getLogger(__name__)

LEAST = BLOCK // 2
"""Tokens. For fewer nobody waits."""
GIVE_UP = 5
"""Seconds that a flush waits for what is on its way."""
SILENT_SECONDS = 5.0
"""Without an answer of the disk for so long, nobody waits for it."""
REST_SECONDS = 0.5
"""Without a step for so long, the engine is taken to have time."""
SAVE_SECONDS = 3.0
"""How long it may take in the end to write down what is cached."""
PROMPT_TOKENS = 16
"""A step of fewer prompt tokens says little of what prompts cost."""


@dataclass(slots=True, eq=False)
class _Job:
    """Something on its way, and who waits for it."""

    names: Sequence[bytes]
    """Blocks that nobody else needs to ask for."""
    start: int
    end: int
    """They hold these tokens of who asked first."""
    fetch: Fetch | None = None
    load: Load | None = None
    requests: list[Request] = field(default_factory=list[Request])
    late: bool = False
    """Nobody waits for it any more."""

    @property
    def over(self) -> bool:
        if self.fetch is not None:
            return self.fetch.over
        assert self.load is not None
        return self.load.copy.ready()


class Loading:
    """A request that waits here holds no row, and of a step nothing; others go on. When its KV has
    come it returns to its place in the queue, and is looked at again: what was loaded is in the
    tree, what was read from disk is in host memory. A request that is aborted leaves; what was on
    its way arrives all the same."""

    def __init__(self, memory: KVMemory, waiting: Waiting) -> None:
        self.requests = Waiting(memory)
        self._memory = memory
        self._tiers: Tiers | None = memory.tiers
        self._waiting = waiting
        self._jobs: list[_Job] = []
        self._worked = time.monotonic()

    def __len__(self) -> int:
        return len(self.requests)

    def __contains__(self, request: Request) -> bool:
        return request in self.requests

    @property
    def claimed(self) -> int:
        """Slots that those who wait here will hold: what is on its way once, and what each has
        beyond that."""
        claimed = 0
        for job in self._jobs:
            if job.fetch is not None and not job.requests:
                continue  # read ahead, into no slots
            claimed += job.end - job.start
            claimed += sum(max(0, request.target - job.end) for request in job.requests)
        return claimed

    @property
    def busy(self) -> bool:
        """Whether something goes on that `poll` or `rest` should soon look at."""
        spilling = self._memory.spilling
        if self._tiers is None or spilling is None:
            return False
        return bool(self._jobs) or self._tiers.busy or (self._at_rest and spilling.behind)

    @property
    def _at_rest(self) -> bool:
        return time.monotonic() - self._worked > REST_SECONDS

    def takes(self, request: Request) -> bool:
        """Whether a request that would be admitted now waits for KV instead; it is taken out of the
        queue then."""
        tiers = self._tiers
        if tiers is None or tiers.empty:
            return False
        reusable, namespace = request.reusable, request.namespace
        kept = request.tokens[: reusable + 1]  # the last of them may complete a block
        job, start, before = None, self._memory.peek(kept[:-1], namespace), -1
        while job is None and start > before:  # what is there at once may not be all
            names = tiers.reach(request.chain, kept, namespace, start)
            here = _leading(name in tiers.host for name in names)
            if not request.sought:
                request.sought = True
                self._count(start, reusable, here, len(names))
            if not names:
                return False
            first = {names[0], *names[here : here + 1]}  # of all, and of those on disk
            on_way = (job for job in self._jobs if not job.late)
            job = next((job for job in on_way if not first.isdisjoint(job.names)), None)
            job = job or self._begin(request, start, names, here)
            before, start = start, self._memory.peek(kept[:-1], namespace)
        if job is None:
            return False
        self._waiting.remove(request)
        self.requests.append(request)
        job.requests.append(request)
        return True

    def _begin(
        self, request: Request, start: int, names: Sequence[bytes], here: int
    ) -> _Job | None:
        """Start to bring KV to a request, if that pays and is not there at once. ``here``: how many
        of the blocks are in host memory."""
        tiers = self._tiers
        assert tiers is not None
        fetch = self._fetch(request, start, names)
        if fetch is not None:
            return self._add(_Job(fetch.names, start, request.fetched_to, fetch=fetch))
        end = min((start // BLOCK + here) * BLOCK, request.reusable)
        if end - start < LEAST or request.loaded_to >= end:
            return None  # what was loaded and evicted again is not loaded for ever
        if not tiers.costs.pays(end - start, here * tiers.block_bytes, 0):
            return None
        load = self._memory.begin_load(request.tokens[:end], request.namespace, names[:here])
        if load is None:
            return None
        request.loaded_to = end
        if load.copy.ready():
            self._memory.end_load(load)
            return None
        return self._add(_Job(names[:here], start, end, load=load))

    def _fetch(self, request: Request, start: int, names: Sequence[bytes]) -> Fetch | None:
        """Start to read what host memory lacks, if it is some and that pays."""
        tiers = self._tiers
        assert tiers is not None
        size, first = tiers.block_bytes, start // BLOCK
        end = min((first + len(names)) * BLOCK, request.reusable)
        absent = sum(name not in tiers.host for name in names)
        # What was fetched is loaded before more is; what went away meanwhile is not fetched again.
        if not absent or end - start < LEAST or request.fetched_to > start:
            return None
        if any(job.late for job in self._jobs):
            return None
        if not tiers.costs.pays(end - start, len(names) * size, absent * size):
            return None
        fetch = tiers.fetch(names)
        if fetch is not None:
            request.fetched_to = (first + len(fetch.held) + len(fetch.names)) * BLOCK
        return fetch

    def _add(self, job: _Job) -> _Job:
        self._jobs.append(job)
        return job

    def _count(self, start: int, reusable: int, here: int, kept: int) -> None:
        """What a prompt found in each tier; of what host memory lacks the disk is asked."""
        tiers = self._tiers
        assert tiers is not None
        first = start // BLOCK
        in_host = max(0, min((first + here) * BLOCK, reusable) - start)
        in_any = max(0, min((first + kept) * BLOCK, reusable) - start)
        host, disk = tiers.counts["host"], tiers.counts["disk"]
        host.hit_tokens += in_host
        host.miss_tokens += reusable - start - in_host
        if tiers.disk is not None:
            disk.hit_tokens += in_any - in_host
            disk.miss_tokens += reusable - start - in_any

    def poll(self, refused: Request | None = None) -> None:
        """Put back into the queue whose KV has come. For one that was ``refused`` a place just now,
        read ahead: when its turn comes, the disk is not waited for."""
        if self._tiers is None:
            return
        self._tiers.poll()
        if refused is not None and self._tiers.disk is not None and not refused.read_ahead:
            self._read_ahead(refused)
        self._give_up()
        if not any(job.over for job in self._jobs):
            return
        over = [job for job in self._jobs if job.over]
        self._jobs = [job for job in self._jobs if job not in over]
        for job in over:
            if job.load is not None:
                self._memory.end_load(job.load)
            self._return(job)

    def _return(self, job: _Job) -> None:
        """Who waits for this waits no longer."""
        for request in job.requests:
            self.requests.remove(request)
            self._waiting.place(request)
        job.requests.clear()

    def _give_up(self) -> None:
        """If the disk does not answer, compute. Until it does, nothing else is asked of it."""
        waited = [job for job in self._jobs if job.fetch is not None and not job.late]
        now = time.monotonic() if waited else 0.0
        for job in waited:
            if job.fetch is not None and not job.over and now - job.fetch.moved > SILENT_SECONDS:
                if not any(other.late for other in self._jobs):
                    log.warning("disk cache: no answer for %g s", SILENT_SECONDS)
                job.late = True
                self._return(job)

    def _read_ahead(self, request: Request) -> None:
        request.read_ahead = True
        if request.row >= 0 or request in self.requests:
            return
        tiers, kept = self._tiers, request.tokens[: request.reusable + 1]
        assert tiers is not None
        start = self._memory.peek(kept[:-1], request.namespace)
        names = tiers.reach(request.chain, kept, request.namespace, start)
        fetch = self._fetch(request, start, names)
        if fetch is not None:
            self._add(_Job(fetch.names, start, request.fetched_to, fetch=fetch))

    def remove(self, request: Request) -> None:
        """A request is aborted."""
        self.requests.remove(request)
        for job in self._jobs:
            if request in job.requests:
                job.requests.remove(request)

    def settle(self) -> bool:
        """Slots are short: wait for copies that are under way, by which theirs become the tree's.
        False if there are none."""
        loads = [job.load for job in self._jobs if job.load is not None]
        for load in loads:
            load.copy.wait()
        self.poll()
        return bool(loads)

    def private(self) -> Iterator[SlotArray]:
        """Slots that are being filled."""
        return (job.load.private for job in self._jobs if job.load is not None)

    # --- by and by ------------------------------------------------------------------------------

    def computed(self, batch: StepBatch, seconds: float) -> None:
        """A step took so long: for the estimate of what prompts cost."""
        self._worked = time.monotonic()
        if self._tiers is not None and batch.num_tokens - batch.num_decodes >= PROMPT_TOKENS:
            self._tiers.costs.compute.add(batch.num_tokens, seconds)

    def rest(self) -> None:
        """There is nothing to compute: write ahead what would be lost with this process."""
        if self._tiers is not None and self._memory.spilling is not None:
            self._tiers.poll()
            if self._at_rest:
                self._memory.spilling.rest()

    def flush(self) -> None:
        """See that nothing is on its way any more. A disk that does not answer is given up."""
        for _ in range(GIVE_UP):
            if self._tiers is None or not self._jobs:
                return
            self._tiers.settle(1.0)
            self.settle()

    def close(self, seconds: float = SAVE_SECONDS) -> None:
        """Before the end: write what is cached, as far as the time goes."""
        if self._tiers is not None and self._memory.spilling is not None:
            self.flush()
            self._memory.spilling.finish(seconds)
            self._tiers.close()

    def facts(self) -> dict[str, Any]:
        """For operators; empty where there are no tiers."""
        if self._tiers is None:
            return {}
        return {"loading": len(self), **self._tiers.facts()}


def _leading(there: Iterator[bool]) -> int:
    """How many are true before the first that is not."""
    count = 0
    for yes in there:
        if not yes:
            break
        count += 1
    return count
