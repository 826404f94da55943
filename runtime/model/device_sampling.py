"""Samples of a step on a CUDA device: from its hidden states, or logits, to the ticket."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ...kernels.operands import Masks
from ...kernels.ops import Ops
from ..scheduler.batch import StepBatch
from .device_ticket import DeviceTicket, MaskedTicket, Scored
from .ends import ends_of, only_ends
from .families.decoder import Decoder
from .graphs import CapturedDecode, CapturedExtend
from .mask_rows import MaskRows
from .sampler import Sampled, Sampler
from .staging import Staging, fetch
from .tables import RequestTables
from .trie_steps import scored_rows, target_logprobs

LOGITS_BYTES = 1 << 30
"""Of what stands beside logits at most: more positions than that allows go in pieces."""


class DeviceSampling:
    """Of one runner. Everything is launched, nothing waited for: the samples' copies to the host
    are in the stream when a ticket is made."""

    def __init__(
        self,
        decoder: Decoder,
        ops: Ops,
        sampler: Sampler,
        tables: RequestTables,
        staging: Staging,
        masks: MaskRows,
    ) -> None:
        self._decoder = decoder
        self._ops = ops
        self._sampler = sampler
        self._tables = tables
        self._staging = staging
        self._masks = masks
        self._vocab_size = decoder.config.vocab_size

    def eager(self, batch: StepBatch, hidden: torch.Tensor) -> DeviceTicket | MaskedTicket:
        """Of a step whose hidden states are ``hidden``: [T, H], or where `only_ends` [S, H]."""
        return self._when_masked(batch, lambda masks: self._sample_eager(batch, hidden, masks))

    def captured(
        self, batch: StepBatch, step: CapturedDecode | CapturedExtend
    ) -> DeviceTicket | MaskedTicket:
        """Run a captured step that has its inputs, and sample."""
        rows = batch.rows[batch.samples]
        plain = not batch.want_logprobs and not batch.top_logprobs
        plain = plain and len(rows) == len(batch.rows) and self._sampler.all_greedy(rows)
        if plain and not len(batch.masked):
            return self._greedy_ticket(batch, step.run_whole())
        raw = step.run()

        def sample(masks: Masks | None) -> DeviceTicket:
            if plain and self._mask_raw(raw[: len(rows)], masks):
                return self._greedy_ticket(batch, step.run_greedy())
            logits = raw[: len(batch.rows)]
            if len(rows) < len(batch.rows):
                (at,) = self._staging.upload([batch.samples])
                logits = logits.index_select(0, at)
            return self._draw(batch, self._decoder.finish_logits(logits), [], masks)

        return self._when_masked(batch, sample)

    def _when_masked(
        self, batch: StepBatch, sample: Callable[[Masks | None], DeviceTicket]
    ) -> DeviceTicket | MaskedTicket:
        """Sample now, or when the masks have come, in the rows that `mask_rows` gave last."""
        if not len(batch.masked):
            return sample(None)
        return MaskedTicket(lambda count, of: sample(self._masks.upload(count, batch.masked, of)))

    def _greedy_ticket(self, batch: StepBatch, taken: torch.Tensor) -> DeviceTicket:
        ids, bad = fetch(taken)[:, : len(batch.rows)]
        return self._under_way(batch, Sampled(ids, bad), [])

    def _sample_eager(
        self, batch: StepBatch, hidden: torch.Tensor, masks: Masks | None
    ) -> DeviceTicket:
        scored = self._score(batch, hidden) if batch.prompt_logprobs else []
        tries = self._score_tries(batch, hidden) if batch.tries else []
        ticket = self._sample_ends(batch, hidden, scored, masks)
        ticket.tries, ticket.trie_values = batch.tries, tries
        return ticket

    def _sample_ends(
        self,
        batch: StepBatch,
        hidden: torch.Tensor,
        scored: list[Scored],
        masks: Masks | None,
    ) -> DeviceTicket:
        picked = hidden
        if not only_ends(batch):
            (last,) = self._staging.upload(ends_of(batch)[:1])
            picked = hidden.index_select(0, last)
        rows = batch.rows[batch.samples]
        plain = not batch.want_logprobs and not batch.top_logprobs
        raw = self._decoder.raw_logits(picked) if len(rows) else picked
        plain = plain and len(rows) > 0 and self._sampler.all_greedy(rows)
        if plain and self._mask_raw(raw, masks):
            ids, bad = self._ops.greedy(raw)
            (at,) = self._staging.upload([rows])
            self._tables.sampled(at.long(), ids)
            return self._ticket(batch, Sampled(ids, bad), scored)
        logits = self._decoder.finish_logits(raw) if len(rows) else raw.float()
        return self._draw(batch, logits, scored, masks)

    def _mask_raw(self, raw: torch.Tensor, masks: Masks | None) -> bool:
        """Forbid tokens where logits are; false where that cannot be done. Of what is forbidden, a
        NaN is not noticed any more."""
        if masks is not None:
            if raw.dtype != torch.float32:
                return False
            self._ops.mask_(raw, masks.rows, masks.at, masks.of)
        return True

    def _draw(
        self,
        batch: StepBatch,
        logits: torch.Tensor,
        scored: list[Scored],
        masks: Masks | None,
    ) -> DeviceTicket:
        rows = batch.rows[batch.samples]
        if not len(rows):
            empty = torch.zeros(0, dtype=torch.int32)
            return self._ticket(batch, Sampled(empty, empty.bool()), scored)
        sampled = self._sampler.sample(
            logits,
            rows,
            batch.steps,
            masks=masks,
            logprobs=batch.want_logprobs or batch.top_logprobs > 0,
            top=batch.top_logprobs,
        )
        (at,) = self._staging.upload([rows])
        self._tables.sampled(at.long(), sampled.ids)
        return self._ticket(batch, sampled, scored)

    def _score_tries(self, batch: StepBatch, hidden: torch.Tensor) -> list[torch.Tensor]:
        """Log-probs of all targets of all tries, in pieces."""
        fields = scored_rows(batch)
        # Beside logits there is what they are summed from.
        chunk = max(1, LOGITS_BYTES // (12 * self._vocab_size))
        rows, of, targets = self._staging.upload(fields)
        found = target_logprobs(
            self._decoder.logits, hidden, rows, of, targets, of_host=fields[1], chunk=chunk
        )
        return [fetch(values) for values in found]

    def _score(self, batch: StepBatch, hidden: torch.Tensor) -> list[Scored]:
        """Log-probs of prompt tokens, all positions in common chunks; (values, top ids, top)."""
        ends = np.cumsum(batch.q_lens, dtype=np.int32)
        where = np.concatenate(
            [
                np.arange(first - 1, last - 1) - int(batch.kv_lens[item]) + ends[item]
                for item, first, last in batch.prompt_logprobs
            ]
        ).astype(np.int32)
        at, targets = self._staging.upload([where, np.concatenate(batch.targets)])
        chunk = max(1, LOGITS_BYTES // (4 * self._vocab_size))
        found: list[Scored] = []
        for rows, ids in zip(at.split(chunk), targets.split(chunk)):
            logits = self._decoder.logits(hidden.index_select(0, rows))
            values = fetch(self._ops.token_logprobs(logits, ids))
            if batch.top_logprobs:
                top_ids, top = self._ops.top_logprobs(logits, batch.top_logprobs)
                found.append((values, fetch(top_ids), fetch(top)))
            else:
                found.append((values, None, None))
        return found

    def _ticket(
        self,
        batch: StepBatch,
        sampled: Sampled,
        scored: list[Scored],
    ) -> DeviceTicket:
        host = Sampled(
            fetch(sampled.ids),
            fetch(sampled.bad),
            None if sampled.logprobs is None else fetch(sampled.logprobs),
            None if sampled.top_ids is None else fetch(sampled.top_ids),
            None if sampled.top_logprobs is None else fetch(sampled.top_logprobs),
        )
        return self._under_way(batch, host, scored)

    def _under_way(self, batch: StepBatch, host: Sampled, scored: list[Scored]) -> DeviceTicket:
        """The ticket of samples whose copies to the host are in the stream."""
        event = torch.cuda.Event()
        event.record()
        spans = [last - first for _, first, last in batch.prompt_logprobs]
        return DeviceTicket(event, host, len(batch.samples), scored, spans)
