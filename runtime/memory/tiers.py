"""KV that left the device: kept in host memory, and on disk, until it is wanted again.

device (tree)          host memory                disk
   evicted ── save ───▶ oldest out ─┐
                        as it comes ┴── store ───▶ oldest out
 slots  ◀──── load ──── row  ◀──────── fetch ───── file
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..protocol.errors import BackendError
from .block_chain import BLOCK, BlockNames
from .disk_tier import DiskTier, Written
from .host_tier import HostTier
from .page_pool import SlotArray
from .radix_node import TokenArray
from .tier_costs import TierCosts

CLEAR_SECONDS = 8.0
"""How long the disk may take before it is emptied. The engine stands still meanwhile: less than a
lease."""

BlockSlots = npt.NDArray[np.int32]
"""[n, BLOCK]"""


class Copy(Protocol):
    """KV on its way between slots and rows."""

    def ready(self) -> bool: ...

    def wait(self) -> None:
        """Until it is `ready`. From any thread."""
        ...

    @property
    def seconds(self) -> float:
        """How long it took, when it is `ready`."""
        ...


class Transfer(Protocol):
    """Moves KV between slots of the device and rows of host memory. Copies are in the order in
    which they were asked for: one that reads what another writes needs no care."""

    block_bytes: int
    num_rows: int

    def row(self, row: int) -> memoryview:
        """The ``block_bytes`` of one row, to read or write."""
        ...

    def save(self, slots: BlockSlots, rows: Sequence[int]) -> Copy:
        """From slots [n, BLOCK], a block a row. The slots may be written by whatever is launched
        after this."""
        ...

    def load(self, rows: Sequence[int], slots: SlotArray, skip: int) -> Copy:
        """From rows, one after the other, less the first ``skip`` tokens, as far as there are
        slots. What was launched before this may still use the slots."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class Fetch:
    """Blocks being read from disk into host memory."""

    names: list[bytes]
    held: list[bytes]
    """Blocks that were there, and must still be when the others have come."""
    began: float
    rows: dict[bytes, int] = field(default_factory=dict[bytes, int])
    """Of those that have not come yet."""
    failed: int = 0
    moved: float = 0.0
    """When something of it came last, or it began."""

    @property
    def over(self) -> bool:
        return not self.rows


@dataclass(slots=True)
class Counts:
    """Of one tier."""

    hit_tokens: int = 0
    miss_tokens: int = 0
    """Tokens of prompts that were looked for, and found or not."""
    loads: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    dropped_blocks: int = 0
    """Blocks that were not kept, as there was no room for them at that moment."""


class Tiers:
    """Belongs to the engine's thread. Rows that a copy or a thread uses are held until `poll` has
    seen the end of it."""

    def __init__(
        self,
        transfer: Transfer,
        names: BlockNames,
        disk: DiskTier | None = None,
        *,
        only_buffer: bool = False,
    ) -> None:
        """``only_buffer``: host memory is what the disk is read and written through, not a tier
        that people asked for."""
        self.names = names
        self.host = HostTier(transfer.num_rows)
        self.disk = disk
        self.costs = TierCosts()
        self.counts = {"host": Counts(), "disk": Counts()}
        self.block_bytes = transfer.block_bytes
        self._transfer = transfer
        self._only_buffer = only_buffer
        self._saves: deque[tuple[Copy, list[bytes]]] = deque()
        self._fetches: list[Fetch] = []

    @property
    def empty(self) -> bool:
        return not self.host and not self.disk

    @property
    def busy(self) -> bool:
        """Whether `poll` has something to wait for."""
        return bool(self._saves) or (self.disk is not None and self.disk.busy)

    def __contains__(self, name: bytes) -> bool:
        return name in self.host or (self.disk is not None and name in self.disk)

    # --- from the device ------------------------------------------------------------------------

    def save(self, names: Sequence[bytes], slots: BlockSlots) -> None:
        """Keep blocks whose slots are about to be free: in the order of a path, or of several."""
        places = {name: at for at, name in enumerate(names) if not self._kept(name)}
        # The end of a path first: it is the oldest then, and goes before what it builds on.
        back = list(reversed(names))
        self.host.touch(back)
        if self.disk is not None:
            self.disk.touch(back)
        taken: list[int] = []
        while len(taken) < len(places) and (row := self.host.take()) is not None:
            taken.append(row)
        self.counts["host"].dropped_blocks += len(places) - len(taken)
        if not taken:
            return
        rows = dict(zip(places, taken))
        at = np.array([places[name] for name in rows])
        copy = self._transfer.save(slots[at], taken)
        for name, row in reversed(rows.items()):
            self.host.enter(name, row)
        self.host.touch(back)
        self._while_copied(copy, list(rows))
        self.counts["host"].stored_bytes += len(rows) * self.block_bytes
        for name in rows:
            self.store(name, copy.wait)

    def _kept(self, name: bytes) -> bool:
        on_disk = self._only_buffer and self.disk is not None and name in self.disk
        return name in self.host or on_disk

    def store(self, name: bytes, ready: Callable[[], None] | None = None) -> bool:
        """Write a block of host memory to disk, if there is one, it is not there, and it has time
        for it."""
        disk = self.disk
        if disk is None or not disk.store(
            name, self._transfer.row(self.host.row(name)), ready or _at_once
        ):
            return False
        self.host.hold([name])
        return True

    # --- to the device --------------------------------------------------------------------------

    def reach(
        self, chain: list[bytes], tokens: TokenArray, namespace: bytes, start: int
    ) -> Sequence[bytes]:
        """Names of the blocks that hold ``tokens`` from ``start`` on, as far as they are kept
        without a gap. ``chain``, names of the first blocks of ``tokens``, is made longer."""
        first = start // BLOCK
        at = first
        while (at + 1) * BLOCK <= len(tokens):
            self.names.extend(chain, tokens, namespace, at + 1)
            if chain[at] not in self:
                break
            at += 1
        return chain[first:at]

    def fetch(self, names: Sequence[bytes]) -> Fetch | None:
        """Read from disk what of these blocks is not in host memory, as far as that has room;
        ``None``: nothing. Whoever asks looks again when it is over."""
        disk = self.disk
        assert disk is not None
        most = max(1, self.host.num_rows // 2)
        on_way = {name for fetch in self._fetches for name in fetch.rows}
        fetch = Fetch([], [name for name in names if name in self.host], time.monotonic())
        self.host.hold(fetch.held)
        for name in names:
            if name in self.host:
                continue
            row = None
            if name in disk and name not in on_way and len(fetch.rows) < most:
                row = self.host.take()
            if row is None:
                break
            fetch.names.append(name)
            fetch.rows[name] = row
            disk.fetch(name, self._transfer.row(row))
        if not fetch.rows:
            self.host.release(fetch.held)
            return None
        fetch.moved = fetch.began
        disk.touch(reversed(fetch.names))
        self._fetches.append(fetch)
        return fetch

    def hold(self, names: Sequence[bytes]) -> None:
        """These blocks stay in host memory, where they are, until `load` or `release`."""
        self.host.hold(names)

    def release(self, names: Sequence[bytes]) -> None:
        self.host.release(names)

    def load(self, names: Sequence[bytes], slots: SlotArray, skip: int) -> Copy:
        """Copy blocks that are held into slots, without the first ``skip`` tokens. Their hold ends
        with the copy."""
        copy = self._transfer.load([self.host.row(name) for name in names], slots, skip)
        self.host.touch(reversed(names))
        self._while_copied(copy, list(names), held=True)
        return copy

    def loaded(self, copy: Copy, blocks: int) -> None:
        """A load is over."""
        size = blocks * self.block_bytes
        self.costs.copy.add(size, copy.seconds)
        self.counts["host"].loads += 1
        self.counts["host"].loaded_bytes += size

    # --- by and by ------------------------------------------------------------------------------

    def poll(self) -> None:
        """Take note of what has ended."""
        while self._saves and self._saves[0][0].ready():
            self.host.release(self._saves.popleft()[1])
        if self.disk is None:
            return
        for result in self.disk.poll():
            if isinstance(result, Written):
                self.host.release([result.name])
                if not result.failed:
                    self.counts["disk"].stored_bytes += self.block_bytes
                continue
            fetch = next(fetch for fetch in self._fetches if result.name in fetch.rows)
            row = fetch.rows.pop(result.name)
            fetch.moved = time.monotonic()
            if result.failed:
                self.host.give_back(row)
                fetch.failed += 1
            else:
                self.host.enter(result.name, row)
            if fetch.over:
                self._finish(fetch)

    def _finish(self, fetch: Fetch) -> None:
        self._fetches.remove(fetch)
        self.host.release(fetch.held)
        self.host.touch(reversed([*fetch.held, *fetch.names]))
        size = (len(fetch.names) - fetch.failed) * self.block_bytes
        self.costs.read.add(size, time.monotonic() - fetch.began)
        self.counts["disk"].loads += 1
        self.counts["disk"].loaded_bytes += size

    def _while_copied(self, copy: Copy, names: list[bytes], *, held: bool = False) -> None:
        if not held:
            self.host.hold(names)
        if copy.ready() and not self._saves:
            self.host.release(names)
        else:
            self._saves.append((copy, names))

    def settle(self, seconds: float) -> None:
        """Wait for copies, and so long for the disk."""
        deadline = time.monotonic() + seconds
        for copy, _ in self._saves:
            copy.wait()
        if self.disk is not None:
            self.disk.wait(deadline)
        self.poll()

    def clear(self) -> None:
        """Forget all that nobody holds, and remove the files. Raises `BackendError`, when all else
        is done, where files stay."""
        self.settle(CLEAR_SECONDS)
        self.host.clear()
        disk = self.disk
        if disk is None:
            return
        if disk.busy:
            raise BackendError("the disk does not answer: what is in disk_cache_dir stays there")
        try:
            disk.clear()
        except OSError as error:
            raise BackendError(f"disk_cache_dir: not all could be removed: {error}") from None

    def close(self) -> None:
        """Stop the threads and let go of host memory."""
        self.settle(1.0)
        if self.disk is not None:
            self.disk.close()
        self._transfer.close()

    def facts(self) -> dict[str, Any]:
        """For operators, by tier, as plain numbers."""
        shown: dict[str, Any] = {"rates": self.costs.facts()}
        disk = self.disk
        for tier, blocks, limit, evicted, refused in (
            ("host", len(self.host), self.host.num_rows, self.host.evicted, 0),
            ("disk", len(disk), disk.limit, disk.evicted, disk.refused)
            if disk is not None
            else ("disk", 0, 0, 0, 0),
        ):
            counts = self.counts[tier]
            shown[tier] = {
                "used_bytes": blocks * self.block_bytes,
                "limit_bytes": limit * self.block_bytes,
                "evicted_blocks": evicted,
                "refused_blocks": refused,
                **{name: getattr(counts, name) for name in Counts.__slots__},
            }
        return shown


def _at_once() -> None:
    pass
