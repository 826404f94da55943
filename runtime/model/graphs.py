"""Steps captured as CUDA graphs: fixed shapes, fixed addresses, one launch.

A captured step has its inputs in one int32 buffer that `Staging` fills, and leaves hidden states'
logits in a buffer of its own. Rows that pad a step belong to the scratch row of the tables, whose
only KV slot is the scratch slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...kernels.attention.meta import AttentionMeta
from ..scheduler.batch import IntArray, StepBatch
from .ends import Ends
from .families.decoder import Decoder
from .staging import Staging, layout
from .tables import RequestTables


def extend_items(size: int) -> int:
    """Requests that a captured extend step of ``size`` tokens may hold; one more item takes the
    tokens that pad it."""
    return max(8, size // 16)


def make_inputs(sizes: list[int], device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A buffer that uploads go to, and its fields."""
    starts, total = layout(sizes)
    buffer = torch.zeros(total, dtype=torch.int32, device=device)
    return buffer, [buffer[begin : begin + size] for begin, size in zip(starts, sizes)]


@dataclass(slots=True)
class Parts:
    """What a captured step computes with."""

    decoder: Decoder
    kv: torch.Tensor
    tables: RequestTables
    staging: Staging
    scratch_row: int
    pool: Any
    """The memory pool that all graphs share: they never run at the same time."""


class _Captured:
    logits: torch.Tensor
    rows: torch.Tensor
    _taken: torch.Tensor
    _changed: torch.Tensor

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def capture(self) -> None:
        """Run once to compile every kernel, then record the forward, greedy sampling of its logits,
        and both as one: a launch costs, and most steps need nothing between the two."""
        self.forward()
        self._greedy()
        torch.cuda.synchronize()
        self._whole_graph = self._record(self._forward_and_take)
        self._forward_graph = self._record(self.forward)
        self._greedy_graph = self._record(self._take_changed)

    def _record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.parts.pool):
            work()
        return graph

    def forward(self) -> None:
        raise NotImplementedError

    def _greedy(self) -> torch.Tensor:
        """The most likely token of each row, noted as the row's last: [2, items] int32, ids and
        whether they are bad."""
        parts = self.parts
        return parts.decoder.ops.take_greedy(self.logits, self.rows, parts.tables.last_tokens)

    def _forward_and_take(self) -> None:
        self.forward()
        self._taken = self._greedy()

    def _take_changed(self) -> None:
        self._changed = self._greedy()

    def run(self) -> torch.Tensor:
        """Replay the forward; returns the logits [items, V], of padding rows too."""
        self._forward_graph.replay()
        return self.logits

    def run_greedy(self) -> torch.Tensor:
        """After `run`, which the logits may have been changed since: see `run_whole`."""
        self._greedy_graph.replay()
        return self._changed

    def run_whole(self) -> torch.Tensor:
        """Forward and the most likely tokens: [2, items] int32, ids, and 1 where there is none."""
        self._whole_graph.replay()
        return self._taken


class CapturedDecode(_Captured):
    """One new token for each of up to ``size`` rows."""

    def __init__(self, parts: Parts, size: int) -> None:
        super().__init__(parts)
        self.size = size
        device = parts.kv.device
        self._inputs, fields = make_inputs([size] * 3, device)
        self.rows, self._kv_lens, self._slots = fields
        self._pad = np.full(size, parts.scratch_row, np.int32)
        self._ones = np.ones(size, np.int32)
        self._zeros = np.zeros(size, np.int32)
        self.rows.fill_(parts.scratch_row)
        self._kv_lens.fill_(1)
        q_start = torch.arange(size + 1, dtype=torch.int32, device=device)
        self._meta = AttentionMeta(
            table=parts.tables.slots,
            rows=self.rows,
            q_start=q_start,
            kv_lens=self._kv_lens,
            max_q=1,
            max_kv=parts.tables.slots.shape[1],
            num_decodes=size,
        )

    def enter(self, batch: StepBatch) -> None:
        """Give the next `run` its inputs."""
        pad = self.size - len(batch.rows)
        self.parts.staging.fill(
            [
                (batch.rows, self._pad[:pad]),
                (batch.kv_lens, self._ones[:pad]),
                (batch.slots, self._zeros[:pad]),
            ],
            self._inputs,
        )

    def forward(self) -> None:
        parts, tables = self.parts, self.parts.tables
        ids, positions, slots = parts.decoder.ops.enter_decode(
            self.rows, self._kv_lens, self._slots, tables.last_tokens, tables.slots
        )
        hidden = parts.decoder.forward(ids, positions, slots, self._meta, parts.kv)
        self.logits = parts.decoder.raw_logits(hidden)


class CapturedExtend(_Captured):
    """Up to ``size`` new tokens of up to ``max_items`` rows, whose texts are at most ``reach``
    tokens long. What came before them is in the tables already."""

    def __init__(self, parts: Parts, size: int, reach: int) -> None:
        super().__init__(parts)
        self.size = size
        self.max_items = extend_items(size)
        items = self.max_items + 1
        device = parts.kv.device
        self._inputs, fields = make_inputs([size] * 5 + [items] * 3 + [items + 1], device)
        self._ids, self._positions, self._slots, self._places, self._token_rows = fields[:5]
        self.rows, self._kv_lens, self._last, self._q_start = fields[5:]
        most = max(size, items)
        self._zeros = np.zeros(most, np.int32)
        self._padding = np.full(most, parts.scratch_row, np.int32)
        self._token_rows.fill_(parts.scratch_row)
        self.rows.fill_(parts.scratch_row)
        # Until the first real inputs: no items, all tokens padding.
        self._q_start[-1] = size
        self._kv_lens[-1] = size
        self._meta = AttentionMeta(
            table=parts.tables.slots,
            rows=self.rows,
            q_start=self._q_start,
            kv_lens=self._kv_lens,
            max_q=size,
            max_kv=reach,
        )
        firsts = torch.arange(items + 1, dtype=torch.int32, device=device)
        self._ends = Ends(
            self._last,
            AttentionMeta(
                table=parts.tables.slots,
                rows=self.rows,
                q_start=firsts,
                kv_lens=self._kv_lens,
                max_q=1,
                max_kv=reach,
                num_decodes=items,
            ),
        )

    def enter(self, batch: StepBatch, positions: IntArray, places: IntArray) -> None:
        """Give the next `run` its inputs. Of the batch's tokens: ``positions`` [T], and ``places``
        [T], the slots where their KV is read."""
        count, tokens = len(batch.rows), batch.num_tokens
        items, pad = self.max_items + 1 - count, self.size - tokens
        ends = np.cumsum(batch.q_lens, dtype=np.int32)
        zeros, padding = self._zeros, self._padding
        self.parts.staging.fill(
            [
                (batch.ids, zeros[:pad]),
                (positions, zeros[:pad]),
                (batch.slots, zeros[:pad]),
                (places, zeros[:pad]),
                (np.repeat(batch.rows, batch.q_lens), padding[:pad]),
                (batch.rows, padding[:items]),
                (batch.kv_lens, zeros[: items - 1], np.array([pad], np.int32)),
                (ends - 1, zeros[:items]),
                (
                    zeros[:1],
                    ends,
                    np.full(self.max_items - count, tokens, np.int32),
                    np.array([self.size], np.int32),
                ),
            ],
            self._inputs,
        )

    def forward(self) -> None:
        parts = self.parts
        # Padding writes the scratch row's first place, which is slot 0 and stays it.
        at = (self._token_rows.long(), self._positions.long())
        parts.tables.slots.index_put_(at, self._places)
        hidden = parts.decoder.forward(
            self._ids, self._positions, self._slots.long(), self._meta, parts.kv, self._ends
        )
        self.logits = parts.decoder.raw_logits(hidden)
