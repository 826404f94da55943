"""A step being put together, item by item, and what it is when done."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..memory.page_pool import SlotArray
from .batch import FROM_DEVICE, IntArray, LongArray, NewRow, StepBatch, TrieChunk
from .request import Request
from .rows import DECODE, Rows


@dataclass(slots=True)
class Planned:
    """A step that was planned: the batch, and which requests its samples belong to."""

    batch: StepBatch
    rows: IntArray
    """[S] rows that sample."""
    epochs: LongArray
    """[S] to tell a row's request from a later one of the same row."""
    scored: list[tuple[Request, int]]
    """The request and first position of each entry of ``batch.prompt_logprobs``."""
    tries: list[tuple[Request, int]]
    """The request and first target of each entry of ``batch.tries``."""
    ended: list[Request]
    """Requests that this step ends without a sample: they only wanted their prompt computed."""


class StepBuilder:
    """Collects decodes, then chunks of prompts, and moves the rows' counters along."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._items: list[IntArray] = []
        self._q_lens: list[IntArray] = []
        self._ids: list[IntArray] = []
        self._slots: list[SlotArray] = []
        self._samples: list[IntArray] = []
        self._steps: list[IntArray] = []
        self._logprobs: list[tuple[int, int, int]] = []
        self._targets: list[IntArray] = []
        self._scored: list[tuple[Request, int]] = []
        self._tries: list[TrieChunk] = []
        self._tries_of: list[tuple[Request, int]] = []
        self._ended: list[Request] = []
        self._num_decodes = 0
        self.count = 0
        """Items so far."""

    def add_decodes(self, at: IntArray, slots: SlotArray) -> None:
        """One more token for each of the rows ``at``, its KV in ``slots``."""
        if not len(at):
            return
        rows = self._rows
        position = rows.computed[at]
        tokens = rows.tokens[at, position]
        self._items.append(at)
        self._q_lens.append(np.ones(len(at), np.int32))
        self._ids.append(np.where(position < rows.known[at], tokens, np.int32(FROM_DEVICE)))
        self._slots.append(slots)
        self._samples.append(np.arange(len(at), dtype=np.int32))
        self._steps.append(rows.sampled[at])
        rows.slots[at, position] = slots
        rows.computed[at] += 1
        rows.sampled[at] += 1
        self.count = self._num_decodes = len(at)

    def add_chunk(self, request: Request, end: int) -> None:
        """The tokens of a request up to ``end``: its prompt, or output that was forced; the last
        chunk samples. The slots they are written to follow by `write_to`."""
        rows, row = self._rows, request.row
        start = int(rows.computed[row])
        self._items.append(np.array([row], np.int32))
        self._q_lens.append(np.array([end - start], np.int32))
        self._ids.append(rows.tokens[row, start:end].copy())
        self._score(request, start, end)
        rows.computed[row] = end
        if end == rows.target[row]:
            if request.sampling.max_new_tokens > 0:
                self._samples.append(np.array([self.count], np.int32))
                self._steps.append(rows.sampled[row : row + 1].copy())
                rows.sampled[row] += 1
                rows.state[row] = DECODE
            else:
                self._ended.append(request)
        self.count += 1

    def write_to(self, slots: SlotArray) -> None:
        """Where the K and V of the latest chunk go."""
        self._slots.append(slots)

    def _score(self, request: Request, start: int, end: int) -> None:
        """Ask for the log-probs of tokens whose logits this chunk computes: of a trie, or of the
        prompt."""
        if request.trie is not None:
            found = request.trie.chunk(self.count, request.prompt_len, start, end)
            if found is not None:
                self._tries.append(found[0])
                self._tries_of.append((request, found[1]))
            return
        if not request.wants_prompt_logprobs:
            return
        first = max(request.sampling.logprob_start, request.prompt_logprobs_sent, start + 1)
        last = min(end + 1, request.prompt_len)
        if first >= last:
            return
        self._logprobs.append((self.count, first, last))
        self._targets.append(self._rows.tokens[request.row, first:last].copy())
        self._scored.append((request, first))
        request.prompt_logprobs_sent = last

    def build(self, new_rows: list[NewRow], moves: list[tuple[int, IntArray]]) -> Planned | None:
        """The step, or ``None`` if nothing was added."""
        if not self.count:
            return None
        rows = self._rows
        items = _joined(self._items)
        samples = _joined(self._samples)
        sampling = items[samples]
        wanted = [request.sampling.top_logprobs for request, _ in self._scored]
        if len(sampling):
            wanted.append(int(rows.top_logprobs[sampling].max()))
        batch = StepBatch(
            rows=items,
            q_lens=_joined(self._q_lens),
            kv_lens=rows.computed[items],
            ids=_joined(self._ids),
            slots=_joined(self._slots),
            samples=samples,
            steps=_joined(self._steps),
            new_rows=new_rows,
            moves=moves,
            prompt_logprobs=self._logprobs,
            targets=self._targets,
            tries=self._tries,
            want_logprobs=bool(rows.wants_logprobs[sampling].any()),
            top_logprobs=max(wanted, default=0),
            num_decodes=self._num_decodes,
            masked=np.flatnonzero(rows.masked[sampling]),
        )
        epochs = rows.epoch[sampling]
        return Planned(batch, sampling, epochs, self._scored, self._tries_of, self._ended)


def _joined(pieces: list[IntArray]) -> IntArray:
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate(pieces) if pieces else np.empty(0, np.int32)
