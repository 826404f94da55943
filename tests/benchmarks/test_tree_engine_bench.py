"""The benchmark of tree attention in the engine, on a tiny model and the CPU."""

from __future__ import annotations

import json

import pytest


@pytest.fixture(scope="module")
def bench(bench_module, tmp_path_factory):
    module = bench_module("tree_engine_gpu")
    folder = tmp_path_factory.mktemp("bench")
    config = folder / "tiny.json"
    config.write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
                "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
                "head_dim": 16, "intermediate_size": 64, "vocab_size": 500, "hidden_act": "silu",
                "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 4096,
                "tie_word_embeddings": True, "eos_token_id": 1,
            }
        )
    )  # fmt: skip
    settings = {"device": "cpu", "dtype": "float32", "max_total_tokens": 40_000}
    made = module.Bench(config, settings, str(folder), divide=8)
    yield module, made
    made.close()


def test_both_sides_compute_the_same_work_and_share_what_is_cached(bench):
    module, made = bench
    plans = {}
    for on, side in made.sides.items():
        plan = side.scheduler.plan

        def watched(*, drained=True, on=on, plan=plan):
            planned = plan(drained=drained)
            if planned is not None and planned.batch.num_decodes == 64:
                tree = planned.batch.tree
                plans.setdefault(on, []).append(tree and len(tree.starts))
            return planned

        side.scheduler.plan = watched
    took = made.measure(module.WORK["two_levels"])
    assert set(plans[True]) == {9}, "the system prompt and eight groups are read once each"
    assert set(plans[False]) == {None}
    assert len(took[True]) == len(took[False]) == 2
    assert all(0 < one.step < one.run for side in took.values() for one in side)
    # 8192 + 8 · 2048 were computed once; each turn computes what is new of 64 prompts.
    totals = [side.engine.info() for side in made.sides.values()]
    hits = sum(one["cache_hit_tokens"] for one in totals)
    assert hits >= 4 * 64 * (8192 + 2048) // 8
    rows = {row["what"]: row for row in module.rows_of("x", module.WORK["two_levels"], took)}
    assert rows["run"]["bar"] == "≥ 2"
    assert rows["run"]["off_over_on"] == pytest.approx(rows["run"]["off"] / rows["run"]["on"])


def test_what_is_cached_is_let_go_between_works(bench):
    module, made = bench
    made.measure(module.Work(((4, 64),), 1, 16, 1, "step"))
    usage = made.memory.usage()
    assert usage.free == usage.total
