"""The runner on the CPU: a step is computed when it is launched."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch

from ...kernels.attention.meta import Ancestry, AttentionMeta
from ...kernels.operands import Masks
from ...kernels.ops import ops_for
from ..scheduler.batch import (
    FloatArray,
    IntArray,
    PositionLogprobs,
    StepBatch,
    StepResult,
)
from .config import ModelConfig
from .ends import ends_of, make_ends, only_ends
from .families.registry import family_of
from .layers.weights import Weights
from .sampler import Sampled, Sampler
from .tables import RequestTables
from .trie_steps import (
    ancestry_fields,
    scored_rows,
    split_tries,
    target_logprobs,
    text_positions,
)

LOGITS_BYTES = 256 << 20
"""Prompt log-probs are computed for as many positions at once as fit in this."""


def auto_dtype(device: torch.device | str = "cpu") -> torch.dtype:
    """bfloat16 where the device multiplies it in hardware, else float32."""
    if torch.device(device).type == "cpu":
        fast = torch.backends.mkldnn.is_available() and (
            torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )
        return torch.bfloat16 if fast else torch.float32
    return torch.bfloat16


@dataclass(slots=True)
class HostTicket:
    """A step that is over, but perhaps for its samples. `result` returns them, or raises what the
    step raised."""

    outcome: StepResult | Exception | None = None
    sample: Callable[[Masks], StepResult] | None = None

    def ready(self) -> bool:
        return self.outcome is not None

    def mask(self, rows: IntArray, of: IntArray) -> None:
        if self.sample is None:
            return
        try:
            with torch.inference_mode():
                masks = Masks(torch.from_numpy(rows), of=torch.from_numpy(of))
                self.outcome = self.sample(masks)
        except Exception as error:
            self.outcome = error
        self.sample = None

    def result(self) -> StepResult:
        assert self.outcome is not None, "the step waits for its masks"
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class HostRunner:
    """A `Runner` that computes with torch on the CPU. ``weights`` are named as Hugging Face does.

    Raises `ModelError` when a tensor is missing, misshapen or unknown.
    """

    asynchronous = False
    prompt_sizes: tuple[int, ...] = ()
    sharing = None
    """Attention on the CPU finds by itself what items share."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[str, torch.Tensor]],
        *,
        dtype: torch.dtype,
        num_slots: int,
        max_rows: int,
        context_length: int,
        device: torch.device | str = "cpu",
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.num_slots = num_slots
        self.max_rows = max_rows
        self.context_length = context_length
        self.vocab_size = config.vocab_size
        ops = ops_for(device)
        with torch.inference_mode():
            named = ((name, tensor.to(device=device, dtype=dtype)) for name, tensor in weights)
            self._decoder = family_of(config.architecture)(
                config, ops, Weights(named), positions=context_length
            )
            # Zeros, because padding reads the scratch slot: a NaN there would spread.
            self.kv = torch.zeros(
                (config.num_layers, 2, num_slots, config.num_kv_heads, config.head_dim),
                dtype=kv_dtype or dtype,
                device=device,
            )
            self._tables = RequestTables(max_rows, context_length, device)
            self._sampler = Sampler(ops, max_rows, config.vocab_size, device)
        self._ops = ops

    def launch(self, batch: StepBatch) -> HostTicket:
        try:
            with torch.inference_mode():
                hidden = self._compute(batch)
                if len(batch.masked):
                    return HostTicket(sample=lambda masks: self._finish(batch, hidden, masks))
                return HostTicket(self._finish(batch, hidden, None))
        except Exception as error:
            return HostTicket(error)

    def mask_rows(self, count: int) -> IntArray:
        return np.empty((count, -(-self.vocab_size // 32)), np.int32)

    def close(self) -> None:
        """Let go of KV memory; nothing may be launched afterwards."""
        self.kv = torch.empty(0)

    def _compute(self, batch: StepBatch) -> torch.Tensor:
        """Hidden states of the step's tokens, or of its ends alone."""
        for new in batch.new_rows:
            self._tables.add(new)
            self._sampler.set_row(new.row, new.sampling, new.prompt, new.output)
        return self._forward(batch)

    def _finish(self, batch: StepBatch, hidden: torch.Tensor, masks: Masks | None) -> StepResult:
        sampled = self._sample(batch, hidden, masks)
        result = StepResult(tokens=sampled.ids.numpy(), bad=sampled.bad.numpy())
        if sampled.logprobs is not None:
            result.logprobs = sampled.logprobs.numpy()
        if sampled.top_ids is not None and sampled.top_logprobs is not None:
            result.top_ids = sampled.top_ids.numpy()
            result.top_values = sampled.top_logprobs.numpy()
        if batch.tries:
            result.tries = self._tries(batch, hidden)
        if batch.prompt_logprobs:
            result.prompt_logprobs = self._prompt_logprobs(batch, hidden)
        return result

    def _forward(self, batch: StepBatch) -> torch.Tensor:
        """Hidden states [T, H] of a step's tokens, or of its ends alone; their KV is written."""
        lasts = np.cumsum(batch.q_lens, dtype=np.int64)
        starts = lasts - batch.q_lens
        rows = np.repeat(batch.rows, batch.q_lens).astype(np.int64)
        first = batch.kv_lens - batch.q_lens - starts
        positions = np.arange(len(batch.ids)) + np.repeat(first, batch.q_lens)
        slots = torch.from_numpy(batch.slots.astype(np.int64))
        self._tables.extend(rows, positions, slots)
        for row, lies_in in batch.moves:
            self._tables.move(row, lies_in)
        q_start = np.concatenate((starts[:1], lasts)).astype(np.int32)
        meta = AttentionMeta(
            table=self._tables.slots,
            rows=torch.from_numpy(batch.rows.astype(np.int32)),
            q_start=torch.from_numpy(q_start),
            kv_lens=torch.from_numpy(batch.kv_lens.astype(np.int32)),
            max_q=int(batch.q_lens.max()),
            max_kv=int(batch.kv_lens.max()),
            num_decodes=batch.num_decodes,
            q_lens_host=batch.q_lens.tolist(),
            kv_lens_host=batch.kv_lens.tolist(),
        )
        if (trees := ancestry_fields(batch)) is not None:
            meta.ancestry = Ancestry(*map(torch.from_numpy, trees))
        ids = self._tables.ids(batch, rows)
        at = torch.from_numpy(text_positions(batch, positions.astype(np.int32)))
        ends = None
        if only_ends(batch):
            ends = make_ends(batch, self._tables.slots, [*map(torch.from_numpy, ends_of(batch))])
        return self._decoder.forward(ids, at, slots, meta, self.kv, ends)

    def _sample(self, batch: StepBatch, hidden: torch.Tensor, masks: Masks | None) -> Sampled:
        if len(batch.samples) == 0:
            empty = torch.zeros(0, dtype=torch.int32)
            return Sampled(empty, empty.bool())
        rows = batch.rows[batch.samples]
        if not only_ends(batch):
            hidden = hidden.index_select(0, torch.from_numpy(ends_of(batch)[0]))
        logits = self._decoder.logits(hidden)
        if masks is not None:
            masks = replace(masks, at=torch.from_numpy(batch.masked.astype(np.int32)))
        sampled = self._sampler.sample(
            logits,
            rows,
            batch.steps,
            masks=masks,
            logprobs=batch.want_logprobs or batch.top_logprobs > 0,
            top=batch.top_logprobs,
        )
        self._tables.sampled(torch.from_numpy(rows.astype(np.int64)), sampled.ids)
        return sampled

    def _tries(self, batch: StepBatch, hidden: torch.Tensor) -> list[FloatArray]:
        rows, of, targets = scored_rows(batch)
        found = target_logprobs(
            self._decoder.logits,
            hidden,
            *map(torch.from_numpy, (rows, of, targets)),
            of_host=of,
            chunk=max(1, LOGITS_BYTES // (4 * self.vocab_size)),
        )
        return split_tries(batch.tries, torch.cat(found).numpy())

    def _prompt_logprobs(self, batch: StepBatch, hidden: torch.Tensor) -> list[PositionLogprobs]:
        """One entry each of ``batch.prompt_logprobs``, all positions in common chunks."""
        spans, ends = batch.prompt_logprobs, np.cumsum(batch.q_lens, dtype=np.int64)
        # Position p is judged by the logits of p - 1; item i's last token is at ends[i] - 1.
        at = [
            np.arange(first - 1, last - 1) - int(batch.kv_lens[item]) + ends[item]
            for item, first, last in spans
        ]
        where = torch.from_numpy(np.concatenate(at).astype(np.int64))
        targets = torch.from_numpy(np.concatenate(batch.targets).astype(np.int64))
        chunk = max(1, LOGITS_BYTES // (4 * self.vocab_size))
        values: list[torch.Tensor] = []
        tops: list[tuple[torch.Tensor, torch.Tensor]] = []
        for rows, ids in zip(where.split(chunk), targets.split(chunk)):
            logits = self._decoder.logits(hidden.index_select(0, rows))
            values.append(self._ops.token_logprobs(logits, ids))
            if batch.top_logprobs:
                tops.append(self._ops.top_logprobs(logits, batch.top_logprobs))
        sizes = np.cumsum([len(a) for a in at])[:-1]
        parts = [PositionLogprobs(v) for v in np.split(torch.cat(values).numpy(), sizes)]
        if tops:
            ids = np.split(torch.cat([t[0] for t in tops]).numpy(), sizes)
            logprobs = np.split(torch.cat([t[1] for t in tops]).numpy(), sizes)
            for part, part_ids, part_values in zip(parts, ids, logprobs):
                part.top_ids, part.top_values = part_ids, part_values
        return parts
