"""The runner on one CUDA device: captured steps where shapes repeat, eager ones elsewhere.

A launch uploads one packed array, replays a graph (or launches kernels), and asks for the samples
to be copied back; nothing waits for the device. `DeviceTicket.result` waits for that step alone.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable

import numpy as np
import torch

from ...kernels.attention.meta import Ancestry, AttentionMeta
from ...kernels.ops import Ops, ops_for
from ..scheduler.batch import FROM_DEVICE, IntArray, StepBatch
from ..scheduler.segments import SharingCost
from .batch_places import places_of, positions_of, scratch_batch
from .config import ModelConfig
from .device_ticket import DeviceTicket, MaskedTicket, Scored
from .extend_steps import ExtendSteps
from .families.registry import family_of
from .graphs import CapturedDecode, CapturedExtend, Parts
from .layers.weights import Weights
from .mask_rows import MaskRows
from .sampler import Sampled, Sampler
from .staging import Staging, fetch
from .tables import RequestTables
from .tree_steps import TreeSteps, make_tree_steps
from .trie_steps import ancestry_fields, scored_rows, target_logprobs, text_positions

PAGE = 16
DECODE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448,
                512)  # fmt: skip
LOGITS_BYTES = 1 << 30

_Mask = tuple[torch.Tensor, torch.Tensor] | None
"""Allowed tokens [M, ceil(V / 32)] int32, and which samples [M] int32 they are for."""


class DeviceRunner:
    """A `Runner` on one CUDA device.

    ``num_slots`` counts the scratch page. Raises `ModelError` for weights that do not fit the
    config, or memory that does not hold them.
    """

    asynchronous = True
    sharing: SharingCost | None = None
    """What reading keys once for several rows costs, where steps that do are captured."""

    def __init__(
        self,
        config: ModelConfig,
        decoder_weights: Iterable[tuple[str, torch.Tensor]],
        *,
        dtype: torch.dtype,
        max_rows: int,
        context_length: int,
        device: torch.device,
        ops: Ops | None = None,
    ) -> None:
        self.config = config
        self.device = device
        self.dtype = dtype
        self.max_rows = max_rows
        self.context_length = context_length
        self.vocab_size = config.vocab_size
        self.num_slots = 0
        self._ops = ops or ops_for(device)
        with torch.inference_mode():
            named = ((n, t.to(device=device, dtype=dtype)) for n, t in decoder_weights)
            self._decoder = family_of(config.architecture)(
                config, self._ops, Weights(named), positions=context_length
            )
            # One row more than there are: padding of captured steps belongs to it.
            self._tables = RequestTables(max_rows + 1, context_length, device)
            self._sampler = Sampler(self._ops, max_rows + 1, config.vocab_size, device)
        self._staging = Staging(device, 1 << 16)
        self._masks = MaskRows(device, max_rows, config.vocab_size)
        self._decodes: dict[int, CapturedDecode] = {}
        self._extends: ExtendSteps | None = None
        self._trees: TreeSteps | None = None
        self.kv = torch.empty(0)
        self.take_memory(PAGE)

    def take_memory(self, num_slots: int) -> None:
        """(Re)allocate KV for ``num_slots`` slots, the scratch page among them."""
        config = self.config
        self.kv = torch.empty(0)
        self.num_slots = num_slots
        shape = (config.num_layers, 2, num_slots, config.num_kv_heads, config.head_dim)
        with torch.inference_mode():
            self.kv = torch.zeros(shape, dtype=self.dtype, device=self.device)

    def profile(self, step_tokens: int) -> int:
        """Bytes that the largest step takes beyond what is allocated now: ``step_tokens`` of
        prompt, and a sample of every row. Everything is written to the scratch page."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        tokens = min(step_tokens, self.context_length)
        batch = scratch_batch(self.max_rows, [tokens] * max(1, step_tokens // tokens))
        with torch.inference_mode():
            hidden = self._eager(batch, positions_of(batch))
            rows = min(self.max_rows, LOGITS_BYTES // (4 * self.vocab_size))
            logits = self._decoder.logits(hidden[:1].expand(rows, -1).contiguous())
            self._ops.token_logprobs(logits, self._ops.greedy(logits)[0])
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def capture(
        self,
        largest: int,
        stage: Callable[[str], None] = lambda _: None,
        *,
        extends: bool = True,
        trees: bool = True,
    ) -> None:
        """Record the ladder of decode sizes up to ``largest``, with ``trees`` also of those that
        share, and of extend token counts."""
        parts = Parts(
            decoder=self._decoder,
            kv=self.kv,
            tables=self._tables,
            staging=self._staging,
            scratch_row=self.max_rows,
            pool=torch.cuda.graph_pool_handle(),
        )
        sizes = [s for s in DECODE_SIZES if s <= largest]
        if not sizes or sizes[-1] < min(largest, self.max_rows):
            sizes.append(min(largest, self.max_rows))
        prompts = ExtendSteps(parts, self.context_length) if extends else None
        stage(f"capturing {len(sizes)} decode and {len(prompts or ())} extend steps")
        with torch.inference_mode():
            # Large ones first: the smaller find the pool's memory there.
            for size in sorted(sizes, reverse=True):
                decode = CapturedDecode(parts, size)
                decode.capture()
                self._decodes[size] = decode
            if prompts is not None:
                prompts.capture()
                self._extends = prompts
            if trees:
                self._trees = make_tree_steps(self.config, self.dtype, sizes[-1], parts, stage)
                self.sharing = self._trees.cost if self._trees else None
        self._decodes = dict(sorted(self._decodes.items()))

    @property
    def prompt_sizes(self) -> tuple[int, ...]:
        """Token counts of captured steps that hold prompts alone."""
        return () if self._extends is None else self._extends.sizes

    def mask_rows(self, count: int) -> IntArray:
        return self._masks.rows(count)

    def launch(self, batch: StepBatch) -> DeviceTicket | MaskedTicket:
        with torch.inference_mode():
            for new in batch.new_rows:
                self._sampler.set_row(new.row, new.sampling, new.prompt, new.output)
            decode = self._captured_decode(batch)
            if decode is not None:
                decode.enter(batch)
                return self._run_captured(batch, decode)
            positions = positions_of(batch)
            extend = self._captured_extend(batch)
            if extend is not None:
                self._enter_runs(batch)
                extend.enter(batch, positions, places_of(batch, positions))
                return self._run_captured(batch, extend)
            hidden = self._eager(batch, positions)
            return self._when_masked(batch, lambda mask: self._sample_eager(batch, hidden, mask))

    def _when_masked(
        self, batch: StepBatch, sample: Callable[[_Mask], DeviceTicket]
    ) -> DeviceTicket | MaskedTicket:
        """Sample now, or when the masks have come, the last of which `mask_rows` gave."""
        if not len(batch.masked):
            return sample(None)
        return MaskedTicket(lambda _: sample(self._masks.upload(batch.masked)))

    def close(self) -> None:
        """Let go of graphs and KV memory; nothing may be launched afterwards."""
        torch.cuda.synchronize()
        self._decodes.clear()
        self._extends = None
        self._trees = None
        self.kv = torch.empty(0)
        gc.collect()

    def _captured_decode(self, batch: StepBatch) -> CapturedDecode | None:
        count = len(batch.rows)
        if batch.num_decodes < count or batch.moves or batch.new_rows:
            return None
        sharing = self._trees.step_for(batch) if self._trees else None
        return sharing or next((g for s, g in self._decodes.items() if s >= count), None)

    def _captured_extend(self, batch: StepBatch) -> CapturedExtend | None:
        if self._extends is None or batch.num_decodes or batch.prompt_logprobs or batch.tries:
            return None
        return self._extends.step_for(batch)

    def _enter_runs(self, batch: StepBatch) -> None:
        """Note where the leading positions of new rows, and of rows that moved, lie."""
        runs = [(new.row, new.slots) for new in batch.new_rows if len(new.slots)]
        runs += batch.moves
        if not runs:
            return
        table = self._tables.slots
        uploaded = self._staging.upload([slots for _, slots in runs])
        for (row, _), slots in zip(runs, uploaded):
            table[row, : len(slots)] = slots

    def _eager(self, batch: StepBatch, positions: IntArray) -> torch.Tensor:
        """Hidden states [T, H]; kernels are launched one by one."""
        self._enter_runs(batch)
        q_start = np.zeros(len(batch.rows) + 1, np.int32)
        np.cumsum(batch.q_lens, out=q_start[1:])
        trees = ancestry_fields(batch)
        stand = [] if trees is None else [text_positions(batch, positions)]
        ids, where, slots, rows, kv_lens, q_start, token_rows, places, *more = self._staging.upload(
            [
                batch.ids,
                positions,
                batch.slots,
                batch.rows,
                batch.kv_lens,
                q_start,
                np.repeat(batch.rows, batch.q_lens),
                places_of(batch, positions),
                *stand,
                *(trees or ()),
            ]
        )
        self._tables.slots.index_put_((token_rows.long(), where.long()), places)
        if (batch.ids == FROM_DEVICE).any():
            last = self._tables.last_tokens.index_select(0, token_rows)
            ids = torch.where(ids == FROM_DEVICE, last, ids)
        meta = AttentionMeta(
            table=self._tables.slots,
            rows=rows,
            q_start=q_start,
            kv_lens=kv_lens,
            max_q=int(batch.q_lens.max()),
            max_kv=int(batch.kv_lens.max()),
            num_decodes=batch.num_decodes,
            q_lens_host=batch.q_lens.tolist(),
            kv_lens_host=batch.kv_lens.tolist(),
        )
        if more:
            where, meta.ancestry = more[0], Ancestry(*more[1:])
        return self._decoder.forward(ids, where, slots.long(), meta, self.kv)

    def _run_captured(
        self, batch: StepBatch, step: CapturedDecode | CapturedExtend
    ) -> DeviceTicket | MaskedTicket:
        rows = batch.rows[batch.samples]
        plain = not batch.want_logprobs and not batch.top_logprobs
        plain = plain and len(rows) == len(batch.rows) and self._sampler.all_greedy(rows)
        if plain and not len(batch.masked):
            return self._greedy_ticket(batch, step.run_whole())
        raw = step.run()

        def sample(mask: _Mask) -> DeviceTicket:
            if plain and self._mask_raw(raw[: len(rows)], mask):
                return self._greedy_ticket(batch, step.run_greedy())
            logits = raw[: len(batch.rows)]
            if len(rows) < len(batch.rows):
                (at,) = self._staging.upload([batch.samples])
                logits = logits.index_select(0, at)
            return self._draw(batch, self._decoder.finish_logits(logits), [], mask)

        return self._when_masked(batch, sample)

    def _greedy_ticket(self, batch: StepBatch, taken: torch.Tensor) -> DeviceTicket:
        ids, bad = fetch(taken)[:, : len(batch.rows)]
        return self._under_way(batch, Sampled(ids, bad), [])

    def _sample_eager(self, batch: StepBatch, hidden: torch.Tensor, mask: _Mask) -> DeviceTicket:
        ends = np.cumsum(batch.q_lens, dtype=np.int32)
        scored = self._score(batch, hidden, ends) if batch.prompt_logprobs else []
        tries = self._score_tries(batch, hidden) if batch.tries else []
        ticket = self._sample_ends(batch, hidden, ends, scored, mask)
        ticket.tries, ticket.trie_values = batch.tries, tries
        return ticket

    def _sample_ends(
        self,
        batch: StepBatch,
        hidden: torch.Tensor,
        ends: IntArray,
        scored: list[Scored],
        mask: _Mask,
    ) -> DeviceTicket:
        (last,) = self._staging.upload([ends[batch.samples] - 1])
        rows = batch.rows[batch.samples]
        picked = hidden.index_select(0, last)
        plain = not batch.want_logprobs and not batch.top_logprobs
        raw = self._decoder.raw_logits(picked) if len(rows) else picked
        plain = plain and len(rows) > 0 and self._sampler.all_greedy(rows)
        if plain and self._mask_raw(raw, mask):
            ids, bad = self._ops.greedy(raw)
            (at,) = self._staging.upload([rows])
            self._tables.sampled(at.long(), ids)
            return self._ticket(batch, Sampled(ids, bad), scored)
        logits = self._decoder.finish_logits(raw) if len(rows) else raw.float()
        return self._draw(batch, logits, scored, mask)

    def _mask_raw(self, raw: torch.Tensor, mask: _Mask) -> bool:
        """Forbid tokens where logits are; false where that cannot be done. Of what is forbidden, a
        NaN is not noticed any more."""
        if mask is not None:
            if raw.dtype != torch.float32:
                return False
            self._ops.mask_(raw, *mask)
        return True

    def _draw(
        self,
        batch: StepBatch,
        logits: torch.Tensor,
        scored: list[Scored],
        mask: _Mask,
    ) -> DeviceTicket:
        rows = batch.rows[batch.samples]
        if not len(rows):
            empty = torch.zeros(0, dtype=torch.int32)
            return self._ticket(batch, Sampled(empty, empty.bool()), scored)
        sampled = self._sampler.sample(
            logits,
            rows,
            batch.steps,
            mask=None if mask is None else mask[0],
            masked=None if mask is None else mask[1],
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
        chunk = max(1, LOGITS_BYTES // (12 * self.vocab_size))
        rows, of, targets = self._staging.upload(fields)
        found = target_logprobs(
            self._decoder.logits, hidden, rows, of, targets, of_host=fields[1], chunk=chunk
        )
        return [fetch(values) for values in found]

    def _score(self, batch: StepBatch, hidden: torch.Tensor, ends: IntArray) -> list[Scored]:
        """Log-probs of prompt tokens, all positions in common chunks; (values, top ids, top)."""
        where = np.concatenate(
            [
                np.arange(first - 1, last - 1) - int(batch.kv_lens[item]) + ends[item]
                for item, first, last in batch.prompt_logprobs
            ]
        ).astype(np.int32)
        at, targets = self._staging.upload([where, np.concatenate(batch.targets)])
        chunk = max(1, LOGITS_BYTES // (4 * self.vocab_size))
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
