"""The running requests, in columns: what every step reads and writes, without a loop over
requests."""

from __future__ import annotations

import numpy as np

from .batch import IntArray
from .request import Request

EMPTY, PREFILL, DECODE = 0, 1, 2
_NO_TOKEN = -1


class Rows:
    """One row a running request; row numbers are those of the runner's tables.

    ``computed`` counts tokens whose KV a launched step writes; ``sampled`` the tokens launched
    steps sample; ``known`` the tokens (prompt and output) the host has seen. On an asynchronous
    device ``computed`` and ``sampled`` run ahead of ``known``."""

    def __init__(self, max_rows: int, context_length: int) -> None:
        self.requests: list[Request | None] = [None] * max_rows
        self.tokens = np.zeros((max_rows, context_length), np.int32)
        self.slots = np.zeros((max_rows, context_length), np.int32)
        self.state = np.zeros(max_rows, np.uint8)
        self.epoch = np.zeros(max_rows, np.int64)
        self.rid = np.zeros(max_rows, np.int64)
        self.serial = np.zeros(max_rows, np.int64)
        self.computed = np.zeros(max_rows, np.int32)
        self.target = np.zeros(max_rows, np.int32)
        self.known = np.zeros(max_rows, np.int32)
        self.sampled = np.zeros(max_rows, np.int32)
        self.max_new = np.zeros(max_rows, np.int32)
        self.min_new = np.zeros(max_rows, np.int32)
        self.prompt_len = np.zeros(max_rows, np.int32)
        self.shared = np.zeros(max_rows, np.int32)
        self.stop_ids = np.full((max_rows, 4), _NO_TOKEN, np.int32)
        self.stop_strings = np.zeros(max_rows, np.bool_)
        self.wants_logprobs = np.zeros(max_rows, np.bool_)
        self.top_logprobs = np.zeros(max_rows, np.int32)
        self.masked = np.zeros(max_rows, np.bool_)
        self.healing = np.zeros(max_rows, np.bool_)
        self.level = np.zeros(max_rows, np.int64)
        self.claim = np.zeros(max_rows, np.int64)
        self.first_at = np.zeros(max_rows, np.float64)
        self._free = list(range(max_rows - 1, -1, -1))
        self.running = 0

    @property
    def decoding(self) -> IntArray:
        """Rows [D] that sample another token without more of a prompt."""
        return np.flatnonzero((self.state == DECODE) & (self.sampled < self.max_new)).astype(
            np.int32
        )

    @property
    def begun(self) -> IntArray:
        """Rows [P] with prompt left to compute, in no order."""
        return np.flatnonzero((self.state == PREFILL) & (self.computed < self.target)).astype(
            np.int32
        )

    @property
    def has_room(self) -> bool:
        return bool(self._free)

    def enter(self, request: Request, slots: IntArray, cached: int) -> int:
        """Give a request a row. ``slots`` hold its tokens up to the target, the first ``cached`` of
        them computed already and the tree's."""
        row = self._free.pop()
        self.slots[row, : len(slots)] = slots
        self.shared[row] = cached
        self.level[row] = request.level
        self._fill(row, request, cached)
        self.running += 1
        return row

    def take_over(self, row: int, request: Request, computed: int) -> None:
        """The request of a row has ended, and another goes on behind it: with the first
        ``computed`` of its slots, of which as many as before are the tree's."""
        ended = self.requests[row]
        assert ended is not None
        ended.tokens = self.tokens[row, : self.known[row]].copy()
        ended.first_token = float(self.first_at[row])
        ended.row = -1
        self._fill(row, request, computed)

    def _fill(self, row: int, request: Request, computed: int) -> None:
        sampling = request.sampling
        size = len(request.tokens)
        self.requests[row] = request
        self.tokens[row, :size] = request.tokens
        self.state[row] = PREFILL
        self.epoch[row] += 1
        self.rid[row] = request.rid
        self.serial[row] = request.serial
        self.computed[row] = computed
        self.target[row] = request.target
        self.known[row] = size
        self.sampled[row] = len(request.output)
        self.max_new[row] = sampling.max_new_tokens
        self.min_new[row] = sampling.min_new_tokens
        self.prompt_len[row] = request.prompt_len
        self._set_stops(row, sampling.stop_ids)
        self.stop_strings[row] = bool(sampling.stops)
        self.wants_logprobs[row] = sampling.logprobs
        self.top_logprobs[row] = sampling.top_logprobs
        self.healing[row] = request.heal_left > 0
        self.masked[row] = sampling.constraint is not None or request.heal_left > 0
        self.first_at[row] = request.first_token
        request.row = row

    def leave(self, row: int) -> Request:
        """Take the request off its row; it takes along the tokens known."""
        request = self.requests[row]
        assert request is not None
        request.tokens = self.tokens[row, : self.known[row]].copy()
        request.first_token = float(self.first_at[row])
        request.row = -1
        self.requests[row] = None
        self.state[row] = EMPTY
        self.epoch[row] += 1
        self._free.append(row)
        self.running -= 1
        return request

    def force(self, row: int, tokens: IntArray) -> None:
        """Output that the row did not sample becomes known, and is to be computed like a prompt. A
        step under way that samples for the row no longer counts."""
        known = int(self.known[row])
        target = known + len(tokens)
        self.tokens[row, known:target] = tokens
        self.known[row] = self.target[row] = target
        self.sampled[row] = target - self.prompt_len[row]
        self.state[row] = PREFILL
        self.epoch[row] += 1

    def private(self, row: int) -> IntArray:
        """Slots of a row that are not the tree's."""
        end = max(int(self.computed[row]), self._allocated(row))
        return self.slots[row, self.shared[row] : end]

    def _allocated(self, row: int) -> int:
        """A prefilling row owns slots up to its target, before they are computed."""
        return int(self.target[row]) if self.state[row] == PREFILL else 0

    def _set_stops(self, row: int, ids: tuple[int, ...]) -> None:
        width = self.stop_ids.shape[1]
        if len(ids) > width:
            wider = np.full((len(self.stop_ids), len(ids)), _NO_TOKEN, np.int32)
            wider[:, :width] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[row] = _NO_TOKEN
        self.stop_ids[row, : len(ids)] = ids
