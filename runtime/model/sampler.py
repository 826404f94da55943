"""One token for every row of a batch at once, from logits and what each row asked for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ...kernels.operands import Masks
from ...kernels.ops import Ops
from ...kernels.reference.sampling import GREEDY_BELOW
from ..protocol.messages import EngineSampling
from ..scheduler.batch import IntArray
from .penalties import PenaltyCounts
from .staging import Staging, to_device

Rows = npt.NDArray[np.int64]

# What a row needs beyond the largest logit; a step takes only the paths that one of its rows needs.
_DRAW, _FILTER, _PENALTY, _BIAS, _MINIMUM = 1, 2, 4, 8, 16


@dataclass(slots=True)
class Sampled:
    """[S] ids int32, [S] bad bool; log-probs of the raw logits where asked for."""

    ids: torch.Tensor
    bad: torch.Tensor
    logprobs: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None


class Sampler:
    """Sampling parameters by row, and the step that uses them.

    Order: penalties, logit bias, minimum length, mask; then the largest logit or, of the softmax at
    the temperature, top-k, top-p, min-p and a draw by (seed, step).
    """

    def __init__(
        self, ops: Ops, max_rows: int, vocab_size: int, device: torch.device | str = "cpu"
    ) -> None:
        self.ops = ops
        self.device = torch.device(device)
        self._staging = Staging(self.device, 8 * max_rows)
        self._temperature = np.zeros(max_rows, dtype=np.float32)
        self._top_p = np.ones(max_rows, dtype=np.float32)
        self._min_p = np.zeros(max_rows, dtype=np.float32)
        self._top_k = np.full(max_rows, -1, dtype=np.int32)
        self._seeds = np.zeros(max_rows, dtype=np.int64)
        self._needs = np.zeros(max_rows, dtype=np.int32)
        self._minimum = np.zeros(max_rows, dtype=np.int64)
        self._bias: dict[int, tuple[Rows, npt.NDArray[np.float32]]] = {}
        self._stops: dict[int, Rows] = {}
        self._penalties = PenaltyCounts(ops, max_rows, vocab_size, device)

    def set_row(
        self, row: int, sampling: EngineSampling, prompt: IntArray, output: IntArray
    ) -> None:
        """Give a row to a request; ``prompt`` and ``output`` are what penalties count."""
        needs = 0
        if sampling.temperature >= GREEDY_BELOW and sampling.top_k != 1:
            needs |= _DRAW
            if sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0:
                needs |= _FILTER
        greedy = not needs & _DRAW
        self._temperature[row] = 0.0 if greedy else sampling.temperature
        self._top_k[row] = sampling.top_k
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p
        self._seeds[row] = sampling.seed
        if self._penalties.set_row(row, sampling, prompt, output):
            needs |= _PENALTY
        self._bias.pop(row, None)
        if sampling.bias_ids:
            needs |= _BIAS
            self._bias[row] = (
                np.array(sampling.bias_ids, dtype=np.int64),
                np.array(sampling.bias_values, dtype=np.float32),
            )
        self._stops.pop(row, None)
        self._minimum[row] = sampling.min_new_tokens
        if sampling.min_new_tokens > 0 and sampling.stop_ids:
            needs |= _MINIMUM
            self._stops[row] = np.array(sampling.stop_ids, dtype=np.int64)
        self._needs[row] = needs

    def all_greedy(self, rows: IntArray) -> bool:
        """Whether each of these rows takes its largest logit, unchanged."""
        return not self._needs[rows].any()

    def sample(
        self,
        logits: torch.Tensor,
        rows: IntArray,
        steps: IntArray,
        *,
        masks: Masks | None = None,
        logprobs: bool = False,
        top: int = 0,
    ) -> Sampled:
        """Take a token for each of ``rows`` [S]. ``logits`` [S, V] float32 may be changed.

        ``steps`` [S]: tokens sampled before. ``masks``: allowed tokens, as `Ops.mask_` takes them.
        """
        ops = self.ops
        needs = int(np.bitwise_or.reduce(self._needs[rows])) if len(rows) else 0
        changed = bool(needs & (_PENALTY | _BIAS | _MINIMUM)) or masks is not None
        # Log-probs and bad rows are those of the raw logits, so they come before any change.
        top_ids = top_values = None
        if top:
            top_ids, top_values = ops.top_logprobs(logits, top)
        raw = logits.clone() if logprobs and changed else logits
        bad = ops.greedy(logits)[1] if changed else None
        if changed:
            self._change(logits, rows, steps, needs)
        if masks is not None:
            ops.mask_(logits, masks.rows, masks.at, masks.of)
        if needs & _DRAW:
            ids, dead = self._draw(logits, rows, steps, bool(needs & _FILTER))
        else:
            ids, dead = ops.greedy(logits)
        bad = dead if bad is None else bad | dead
        ids.masked_fill_(bad, 0)
        if needs & _PENALTY:
            self._penalties.count(rows, ids)
        values = ops.token_logprobs(raw, ids) if logprobs else None
        return Sampled(ids, bad, values, top_ids, top_values)

    def _change(
        self,
        logits: torch.Tensor,
        rows: IntArray,
        steps: IntArray,
        needs: int,
    ) -> None:
        if needs & _PENALTY:
            self._penalties.apply_(logits, rows)
        if needs & _BIAS:
            entries = [(i, *self._bias[r]) for i, r in enumerate(rows.tolist()) if r in self._bias]
            self._add(logits, entries)
        if needs & _MINIMUM:
            never = np.float32(-np.inf)
            entries = [
                (i, self._stops[r], np.full(len(self._stops[r]), never))
                for i, r in enumerate(rows.tolist())
                if r in self._stops and steps[i] < self._minimum[r]
            ]
            self._add(logits, entries)

    def _add(
        self,
        logits: torch.Tensor,
        entries: list[tuple[int, Rows, npt.NDArray[np.float32]]],
    ) -> None:
        if not entries:
            return
        rows = np.concatenate([np.full(len(ids), i, dtype=np.int64) for i, ids, _ in entries])
        ids = np.concatenate([ids for _, ids, _ in entries])
        values = np.concatenate([values for _, _, values in entries])
        self.ops.add_at_(logits, self._to(rows), self._to(ids), self._to(values))

    def _draw(
        self, logits: torch.Tensor, rows: IntArray, steps: IntArray, filtered: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        fields = self._staging.upload(
            [
                self._seeds[rows].view(np.int32),
                self._temperature[rows].view(np.int32),
                self._top_p[rows].view(np.int32),
                self._min_p[rows].view(np.int32),
                self._top_k[rows],
                steps,
            ]
        )
        seeds, (temperature, top_p, min_p) = fields[0], (f.view(torch.float32) for f in fields[1:4])
        return self.ops.sample(
            logits,
            temperature,
            fields[4],
            top_p,
            min_p,
            seeds.view(torch.int64),
            fields[5],
            filtered=filtered,
        )

    def _to(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return to_device(array, self.device)
