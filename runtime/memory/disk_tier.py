"""Blocks of KV on disk: which are there, and threads that read and write them. No step waits for
either."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .block_files import BlockFiles, RefusedError

log = logging.getLogger(__name__)

MOST_WRITES = 64
"""Blocks that may wait to be written; more are not taken."""
READERS, WRITERS = 4, 2
"""Threads. What they do most of is sealing and checking, a second for about a GiB."""
TOLD = 5
"""Refused files that are named in the log; of later ones every thousandth is."""
CLOSE_SECONDS = 2.0
PAUSE_SECONDS = 30.0
"""For so long nothing is written after a write has failed: the disk may be full."""


@dataclass(frozen=True, slots=True)
class Written:
    """A write that is over; the bytes it wrote are the caller's again."""

    name: bytes
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Read:
    """A read that is over. ``failed``: there was nothing to be had."""

    name: bytes
    failed: bool = False


class DiskTier:
    """Belongs to one thread, which gives jobs by `store` and `fetch` and learns by `poll` what has
    become of them. Of ``limit_bytes`` the oldest files make way for new ones."""

    def __init__(self, files: BlockFiles, limit_bytes: int, readers: int = READERS) -> None:
        self.files = files
        self.limit = limit_bytes // files.disk_bytes
        """Blocks."""
        assert self.limit > 0, "checked where the setting is read"
        self.evicted = 0
        self.refused = 0
        """Files that were not what their name said."""
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._writing: set[bytes] = set()
        self._removing: deque[bytes] = deque()
        self._reading = 0
        self._paused_until = 0.0
        self._failures = 0
        self._stuck = False
        self._results: deque[tuple[Written | Read, str]] = deque()
        self._writes: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        for found in files.scan():
            self._known[found.name] = None
        self._trim()
        self._queues = [*[self._writes] * WRITERS, *[self._reads] * readers]
        self._threads = [
            threading.Thread(target=_work, args=(jobs,), daemon=True, name="ramet-disk-cache")
            for jobs in self._queues
        ]
        for thread in self._threads:
            thread.start()

    def __contains__(self, name: bytes) -> bool:
        return name in self._known

    def __len__(self) -> int:
        return len(self._known)

    def has(self, name: bytes) -> bool:
        """Whether a block is there, or being written."""
        return name in self._known or name in self._writing

    @property
    def busy(self) -> bool:
        """Whether `poll` has something to wait for."""
        return bool(self._writing or self._reading or self._results)

    @property
    def room(self) -> int:
        """How many more blocks `store` would take now."""
        if self._paused_until and time.monotonic() < self._paused_until:
            return 0
        return MOST_WRITES - len(self._writing)

    def touch(self, names: Iterable[bytes]) -> None:
        """These were used, the last of them latest."""
        for name in names:
            if name in self._known:
                self._known.move_to_end(name)

    def store(self, name: bytes, payload: memoryview, ready: Callable[[], None]) -> bool:
        """Write a block, once ``ready`` has returned; it is called in another thread. False, and
        nothing is done, for one that is there or on its way, or when too many are. ``payload`` must
        stay as it is until `poll` tells of it."""
        if name in self._known or name in self._writing or self.room <= 0:
            return False
        self._writing.add(name)
        gone = list(self._removing)
        self._removing.clear()

        def write() -> None:
            fault = ""
            try:
                for old in gone:
                    self._remove(old)
                ready()
                self.files.write(name, payload)
            except Exception as error:
                fault = f"{type(error).__name__}: {error}"
            self._results.append((Written(name, bool(fault)), fault))

        self._writes.put(write)
        return True

    def fetch(self, name: bytes, into: memoryview) -> None:
        """Read a block that is there."""
        self._reading += 1

        def read() -> None:
            fault = ""
            try:
                self.files.read(name, into)
            except FileNotFoundError:
                self._results.append((Read(name, failed=True), ""))
                return
            except (RefusedError, OSError) as error:
                fault = str(error)
            except Exception as error:
                fault = f"{type(error).__name__}: {error}"
            self._results.append((Read(name, failed=bool(fault)), fault))

        self._reads.put(read)

    def poll(self) -> list[Written | Read]:
        """What is over since the last call."""
        over: list[Written | Read] = []
        while self._results:
            result, fault = self._results.popleft()
            over.append(result)
            if isinstance(result, Written):
                self._writing.discard(result.name)
                if not result.failed:
                    self._known[result.name] = None
                else:
                    self._note_failure(fault)
            else:
                self._reading -= 1
                if result.failed:
                    self._forget(result.name, fault)
        if over:
            self._trim()
        return over

    def wait(self, deadline: float) -> None:
        """Until every job is over, or ``deadline`` on the monotonic clock. `poll` tells of them."""
        jobs = len(self._writing) + self._reading
        while len(self._results) < jobs and time.monotonic() < deadline:
            time.sleep(0.001)

    def clear(self) -> int:
        """Forget and remove every file. Nothing may be on its way. Raises `OSError`, when all
        others are gone, if some could not be removed."""
        assert not self.busy, "wait and poll first"
        names = [*self._known, *self._removing]
        self._known.clear()
        self._removing.clear()
        faults = [fault for name in names if (fault := self._remove(name)) is not None]
        if faults:
            reason = faults[0].strerror  # the log says where
            raise OSError(f"{len(faults)} of {len(names)} files: {reason}")
        return len(names)

    def close(self) -> None:
        """No more jobs. Those that wait get a moment."""
        for name in self._removing:
            self._remove(name)
        self._removing.clear()
        for jobs in self._queues:
            jobs.put(None)
        # A thread that wakes while the interpreter ends would take the process down with it.
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    def _remove(self, name: bytes) -> OSError | None:
        """What hindered it. A file that stays is found again by a later start."""
        try:
            self.files.remove(name)
        except OSError as error:
            if not self._stuck:
                log.warning("disk cache: not removed: %s", error)
            self._stuck = True
            return error
        return None

    def _trim(self) -> None:
        while len(self._known) > self.limit:
            name, _ = self._known.popitem(last=False)
            self._removing.append(name)
            self.evicted += 1

    def _forget(self, name: bytes, fault: str) -> None:
        self._known.pop(name, None)
        if fault:
            self.refused += 1
            self._removing.append(name)
            if self.refused <= TOLD or self.refused % 1000 == 0:
                log.warning("disk cache: %s: not loaded (%d so far)", fault, self.refused)

    def _note_failure(self, fault: str) -> None:
        self._failures += 1
        self._paused_until = time.monotonic() + PAUSE_SECONDS
        if self._failures == 1:
            log.warning("disk cache: nothing is written for a while: %s", fault)


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
