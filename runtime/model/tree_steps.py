"""Captured decode steps that read keys once for all rows that share them.

They are graphs beside the plain ones: a step that shares nothing worth it costs nothing more. What
a graph shares is in its work list, which is uploaded when the scheduler's plan has changed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...kernels.attention.tree import MOST_GROUP, TreeWork, parts_for, shape_for
from ...kernels.attention.worklist import ListShape, WorkList, make_list
from ..scheduler.batch import StepBatch
from ..scheduler.segments import SharingCost
from ..scheduler.tree_plan import TreePlan
from .config import ModelConfig
from .graphs import CapturedDecode, Parts, make_inputs

TREE_SIZES = (4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
SHARING_BYTES = 10 << 20
"""Of keys and values a layer that must be saved: one kernel more takes as long as reading them."""


class TreeDecode(CapturedDecode):
    """`CapturedDecode` by a work list. Layers with a window read as in a plain step."""

    def __init__(
        self, parts: Parts, size: int, shape: ListShape, memory: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        super().__init__(parts, size)
        self.shape = shape
        self._list, fields = make_inputs(shape.sizes, parts.kv.device)
        count, pieces, readers, offsets = fields
        self._meta.tree = TreeWork(shape, count, pieces, readers, offsets, *memory)
        self._version = 0

    def knows(self, plan: TreePlan) -> bool:
        """Whether the list on the device is that of this plan."""
        return plan.version == self._version

    def share(self, plan: TreePlan, work: WorkList) -> None:
        """From the next `run` on, read by this list of the plan."""
        self.parts.staging.fill(work.padded(self.shape), self._list)
        self._version = plan.version


class TreeSteps:
    """The ladder of `TreeDecode` steps of a runner."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, largest: int, parts: Parts) -> None:
        sizes = [s for s in TREE_SIZES if s <= largest]
        if not sizes or sizes[-1] < largest:
            sizes.append(largest)
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        device = parts.kv.device
        shapes = {s: shape_for(heads, kv_heads, dim, dtype, s, device) for s in sizes}
        # Steps never run at the same time, nor do layers: parts lie in the same memory for all.
        memory = parts_for(shapes[sizes[-1]], dim, device)
        self._steps = {s: TreeDecode(parts, s, shapes[s], memory) for s in sizes}
        each = 2 * kv_heads * dim * dtype.itemsize
        self.cost = SharingCost(
            reader=32 + 4 * heads // kv_heads, segment=128, step=SHARING_BYTES // each
        )

    def capture(self) -> None:
        """Record all steps, large ones first: the smaller find the pool's memory there."""
        for step in reversed(self._steps.values()):
            step.capture()

    def step_for(self, batch: StepBatch) -> TreeDecode | None:
        """The step for a batch, its list in place; ``None`` without a plan, or if none holds it."""
        plan, count = batch.tree, len(batch.rows)
        if plan is None:
            return None
        step = next((step for size, step in self._steps.items() if size >= count), None)
        if step is None or step.knows(plan):
            return step
        work = make_list(
            batch.rows, batch.kv_lens, plan.starts, plan.ends, plan.reader_starts, plan.readers,
            plan.tails, step.shape,
        )  # fmt: skip
        if work is None:
            return None
        step.share(plan, work)
        return step


def make_tree_steps(
    config: ModelConfig,
    dtype: torch.dtype,
    largest: int,
    parts: Parts,
    stage: Callable[[str], None],
) -> TreeSteps | None:
    """Capture the steps; ``None`` for models in which sharing is not possible or of no use."""
    windows = [config.window(layer) for layer in range(config.num_layers)]
    wide = any(not window or window >= parts.tables.slots.shape[1] for window in windows)
    group = config.num_heads // config.num_kv_heads
    # Bits that do not depend on the batch cannot depend on who shares what.
    invariant = getattr(parts.decoder.ops, "invariant", False)
    if not wide or invariant or group > MOST_GROUP or largest < 2:
        return None
    steps = TreeSteps(config, dtype, largest, parts)
    stage("capturing decode steps that share")
    steps.capture()
    return steps
