"""Copies of KV between slots of the device and host memory.

Host memory is rows of one block each, [layers, 2, BLOCK, KV heads, head dim] as the device has it,
so that a row is one piece for the bus and for a file. On CUDA nothing waits:

    steps' stream    … step │ gather │ step …                 what is saved is gathered in the
                                └──────┐                      order of steps, so its slots are free
    own stream       ── scatter ──── to host ──── …           at once; loads run beside steps, into
                                                              slots that nobody reads yet
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ..memory.block_chain import BLOCK
from ..memory.page_pool import SlotArray
from ..memory.tiers import BlockSlots, Copy

CHUNK_BYTES = 64 << 20
"""What a copy takes of the device's memory at a time, twice."""
PIECE_BYTES = 1 << 30
"""Pinned memory is taken in pieces of this size: torch rounds sizes up to powers of two."""


class Done:
    """A copy that was over when it was asked for."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class UnderWay:
    """A copy in a stream, from where the stream is now to `launched`."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self._stream = stream
        self._begin.record(stream)

    def launched(self) -> UnderWay:
        self._end.record(self._stream)
        return self

    def ready(self) -> bool:
        return self._end.query()

    def wait(self) -> None:
        self._end.synchronize()

    @property
    def seconds(self) -> float:
        return self._begin.elapsed_time(self._end) / 1000.0


class KVTransfer:
    """A `Transfer` of one runner's ``kv`` [layers, 2, slots, KV heads, head dim]. Raises
    `RuntimeError` where the host has not that much memory (to pin)."""

    def __init__(self, kv: torch.Tensor, num_rows: int) -> None:
        # Some copies are not there for types of one byte.
        self._kv = kv = kv.view(torch.uint8) if kv.dtype.itemsize == 1 else kv
        layers, pair, _, heads, dim = kv.shape
        self._shape = (layers, pair, BLOCK, heads, dim)
        self.block_bytes = block_bytes(kv)
        self.num_rows = num_rows
        self._cuda = kv.device.type == "cuda"
        self._stream = torch.cuda.Stream(kv.device) if self._cuda else None
        self._chunk = max(1, CHUNK_BYTES // self.block_bytes)
        self._per_piece = max(1, PIECE_BYTES // self.block_bytes)
        self._pieces: list[torch.Tensor] = []
        for first in range(0, num_rows, self._per_piece):
            rows = min(self._per_piece, num_rows - first)
            self._pieces.append(
                torch.empty((rows, *self._shape), dtype=kv.dtype, pin_memory=self._cuda)
            )

    def row(self, row: int) -> memoryview:
        block = self._block(row).view(-1).view(torch.uint8)
        return block.numpy().data

    def save(self, slots: BlockSlots, rows: Sequence[int]) -> Copy:
        began = time.perf_counter()
        with torch.inference_mode():
            if self._stream is None:
                for at, row in enumerate(rows):
                    where = torch.from_numpy(slots[at].astype(np.int64))
                    torch.index_select(self._kv, 2, where, out=self._block(row))
                return Done(time.perf_counter() - began)
            copy = UnderWay(self._stream)
            for first in range(0, len(rows), self._chunk):
                some = rows[first : first + self._chunk]
                self._save_chunk(slots[first : first + self._chunk], some, self._stream)
            return copy.launched()

    def _save_chunk(
        self, slots: BlockSlots, rows: Sequence[int], stream: torch.cuda.Stream
    ) -> None:
        gathered = self._kv.index_select(2, self._on_device(slots.reshape(-1)))
        layers, pair, _, heads, dim = gathered.shape
        blocks = gathered.view(layers, pair, len(rows), BLOCK, heads, dim)
        blocks = blocks.permute(2, 0, 1, 3, 4, 5).contiguous()
        stream.wait_stream(torch.cuda.current_stream(self._kv.device))
        with torch.cuda.stream(stream):
            for at, host in self._runs(rows):
                host.copy_(blocks[at : at + len(host)], non_blocking=True)
        blocks.record_stream(stream)

    def load(self, rows: Sequence[int], slots: SlotArray, skip: int) -> Copy:
        began = time.perf_counter()
        with torch.inference_mode():
            if self._stream is None:
                self._load_here(rows, slots, skip)
                return Done(time.perf_counter() - began)
            where = self._on_device(slots)
            # Steps that were launched may still write to slots that were freed meanwhile.
            self._stream.wait_stream(torch.cuda.current_stream(self._kv.device))
            where.record_stream(self._stream)
            copy = UnderWay(self._stream)
            with torch.cuda.stream(self._stream):
                done = 0
                for first in range(0, len(rows), self._chunk):
                    some = rows[first : first + self._chunk]
                    count = min(len(some) * BLOCK - skip, len(slots) - done)
                    self._load_chunk(some, where[done : done + count], skip)
                    done, skip = done + count, 0
            return copy.launched()

    def _load_here(self, rows: Sequence[int], slots: SlotArray, skip: int) -> None:
        done = 0
        for row in rows:
            count = min(BLOCK - skip, len(slots) - done)
            where = torch.from_numpy(slots[done : done + count].astype(np.int64))
            self._kv.index_copy_(2, where, self._block(row)[:, :, skip : skip + count])
            done, skip = done + count, 0

    def _load_chunk(self, rows: Sequence[int], where: torch.Tensor, skip: int) -> None:
        layers, pair, _, heads, dim = self._shape
        blocks = torch.empty(
            (len(rows), *self._shape), dtype=self._kv.dtype, device=self._kv.device
        )
        for at, host in self._runs(rows):
            blocks[at : at + len(host)].copy_(host, non_blocking=True)
        tokens = blocks.permute(1, 2, 0, 3, 4, 5).reshape(layers, pair, -1, heads, dim)
        self._kv.index_copy_(2, where, tokens[:, :, skip : skip + len(where)])

    def close(self) -> None:
        """Let go of host memory, when copies are over."""
        if self._stream is not None:
            self._stream.synchronize()
        self._pieces.clear()

    def _block(self, row: int) -> torch.Tensor:
        piece, at = divmod(row, self._per_piece)
        return self._pieces[piece][at]

    def _runs(self, rows: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Rows that lie one after the other, as one piece of memory each; and where in ``rows``
        each begins."""
        begin = 0
        for at in range(1, len(rows) + 1):
            if at < len(rows) and rows[at] == rows[at - 1] + 1 and rows[at] % self._per_piece:
                continue
            piece, first = divmod(rows[begin], self._per_piece)
            yield begin, self._pieces[piece][first : first + at - begin]
            begin = at

    def _on_device(self, slots: SlotArray) -> torch.Tensor:
        host = torch.from_numpy(slots.astype(np.int64)).pin_memory()
        return host.to(self._kv.device, non_blocking=True)


def block_bytes(kv: torch.Tensor) -> int:
    """Of one block of KV like this."""
    layers, pair, _, heads, dim = kv.shape
    return layers * pair * BLOCK * heads * dim * kv.dtype.itemsize
