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
from .batch_places import places_of, positions_of, runs_of, scratch_batch
from .config import ModelConfig
from .device_sampling import LOGITS_BYTES, DeviceSampling
from .device_ticket import DeviceTicket, MaskedTicket
from .ends import ends_of, make_ends, only_ends
from .extend_steps import ExtendSteps
from .families.registry import family_of
from .graphs import CapturedDecode, CapturedExtend, Parts
from .layers.weights import Weights
from .mask_rows import MaskRows
from .sampler import Sampler
from .staging import Staging
from .tables import RequestTables
from .tree_steps import TreeSteps, make_tree_steps
from .trie_steps import ancestry_fields, text_positions

PAGE = 16
DECODE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448,
                512)  # fmt: skip


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
        self._sampling = DeviceSampling(
            self._decoder, self._ops, self._sampler, self._tables, self._staging, self._masks
        )
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
            self._eager(batch, positions_of(batch), whole=True)
            rows = min(self.max_rows, LOGITS_BYTES // (4 * self.vocab_size))
            shape = (rows, self.config.hidden_size)
            logits = self._decoder.logits(torch.zeros(shape, dtype=self.dtype, device=self.device))
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
                return self._sampling.captured(batch, decode)
            positions = positions_of(batch)
            extend = self._captured_extend(batch)
            if extend is not None:
                self._enter_runs(batch)
                extend.enter(batch, positions, places_of(batch, positions))
                return self._sampling.captured(batch, extend)
            return self._sampling.eager(
                batch, self._eager(batch, positions, whole=not only_ends(batch))
            )

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

    def _eager(self, batch: StepBatch, positions: IntArray, *, whole: bool) -> torch.Tensor:
        """Hidden states [T, H], or of ends alone [S, H] if not ``whole``; kernels are launched one
        by one."""
        self._enter_runs(batch)
        q_start = np.zeros(len(batch.rows) + 1, np.int32)
        np.cumsum(batch.q_lens, out=q_start[1:])
        trees, lies = ancestry_fields(batch), places_of(batch, positions)
        more = [] if whole else ends_of(batch)
        if trees is not None:
            more = [text_positions(batch, positions), *trees]
        ids, where, slots, rows, kv_lens, q_start, token_rows, places, *rest = self._staging.upload(
            [
                batch.ids,
                positions,
                batch.slots,
                batch.rows,
                batch.kv_lens,
                q_start,
                np.repeat(batch.rows, batch.q_lens),
                lies,
                *more,
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
            runs_host=runs_of(batch, lies),
        )
        ends = None
        if trees is not None:
            where, meta.ancestry = rest[0], Ancestry(*rest[1:])
        elif rest:
            ends = make_ends(batch, self._tables.slots, rest)
        return self._decoder.forward(ids, where, slots.long(), meta, self.kv, ends)
