"""A decode step by a work list against the plain one: the same decoder, the same tables."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from ramet.kernels.device_ops import DeviceOps
from ramet.runtime.model.config import ModelConfig
from ramet.runtime.model.families.registry import family_of
from ramet.runtime.model.graphs import CapturedDecode, Parts
from ramet.runtime.model.layers.weights import Weights
from ramet.runtime.model.loader.dummy import dummy_weights
from ramet.runtime.model.staging import Staging
from ramet.runtime.model.tables import RequestTables
from ramet.runtime.model.tree_steps import TreeSteps
from ramet.runtime.scheduler.batch import StepBatch
from ramet.runtime.scheduler.rows import Rows
from ramet.runtime.scheduler.segments import SegmentFinder, SharingCost

MODELS = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 16,
        "sliding_window_pattern": 2, "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 32, "rope_local_base_freq": 1e4, "tie_word_embeddings": True,
    },
}  # fmt: skip
TINY = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 200,
    "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "head_dim": 32, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
MOST = 8


def batch_of(rows, lengths, plan):
    """The step that computes the last token of each row."""
    count = len(lengths)
    at = np.arange(count, dtype=np.int32)
    lens = np.array(lengths, np.int32)
    return StepBatch(
        rows=at, q_lens=np.ones(count, np.int32), kv_lens=lens, ids=np.full(count, -1, np.int32),
        slots=rows.slots[at, lens - 1], samples=at, steps=np.zeros(count, np.int32),
        num_decodes=count, tree=plan,
    )  # fmt: skip


@pytest.mark.parametrize("family", MODELS)
def test_a_step_that_shares_gives_the_same_logits(family, device, close):
    torch.manual_seed(0)
    config = ModelConfig.from_hf({**TINY, **MODELS[family]}, {})
    ops = DeviceOps(pdl=False)
    weights = Weights(
        (n, t * 4 if t.ndim == 2 else t) for n, t in dummy_weights(config, torch.float32, device, 3)
    )
    decoder = family_of(config.architecture)(config, ops, weights, positions=512)
    tables = RequestTables(MOST + 1, 300, device)
    kv = torch.randn(2, 2, 1500, 2, 32, device=device)
    parts = Parts(decoder, kv, tables, Staging(device, 4096), MOST, None)
    plain = CapturedDecode(parts, MOST)
    trees = TreeSteps(config, torch.float32, MOST, parts)

    rows = Rows(MOST, 300)
    free = iter((np.random.default_rng(1).permutation(1400) + 16).astype(np.int32).tolist())

    def take(count):
        return [next(free) for _ in range(count)]

    system, lengths = take(70), []
    groups = [take(40), take(25)]
    for row in range(6):
        path = system + groups[row % 2] + take(3 + row)
        rows.slots[row, : len(path)] = path
        lengths.append(len(path))
    finder = SegmentFinder(rows, SharingCost(1, 0, 1))
    for count in (6, 4):
        lengths = lengths[:count]
        lens = np.array(lengths, np.int32)
        plan = finder.find(np.arange(count, dtype=np.int32), lens)
        assert plan is not None
        assert len(plan.starts) == 3
        tables.slots[:MOST].copy_(torch.from_numpy(rows.slots))
        tables.last_tokens[:MOST] = torch.arange(MOST, device=device, dtype=torch.int32) + 9
        batch = batch_of(rows, lengths, plan)
        plain.enter(batch)
        plain.forward()
        step = trees.step_for(batch)
        assert step is not None
        assert step.knows(plan)
        assert trees.step_for(batch) is step
        step.enter(batch)
        step.forward()
        close(step.logits[:count], plain.logits[:count].double())
        assert torch.isfinite(step.logits).all()
        for row in range(count):
            rows.slots[row, lengths[row]] = take(1)[0]
            lengths[row] += 1


def test_a_list_that_does_not_fit_is_not_used(device):
    config = ModelConfig.from_hf({**TINY, **MODELS["llama"]}, {})
    parts = Parts(
        None, torch.zeros(2, 2, 16, 2, 32, device=device), RequestTables(MOST + 1, 300, device),
        Staging(device, 4096), MOST, None,
    )  # fmt: skip
    trees = TreeSteps(config, torch.float32, MOST, parts)
    rows = Rows(2 * MOST, 300)
    rows.slots[:, :200] = np.arange(1, 201)
    rows.slots[:, 200] = np.arange(300, 300 + 2 * MOST)
    for count, fits in ((MOST, True), (2 * MOST, False)):
        lens = np.full(count, 201, np.int32)
        members = np.arange(count, dtype=np.int32)
        plan = SegmentFinder(rows, SharingCost(1, 0, 1)).find(members, lens)
        assert (trees.step_for(batch_of(rows, lens.tolist(), plan)) is not None) is fits
