"""Programs give the same under every policy and eviction, also where all memory is wished for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ramet as rt

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "tie_word_embeddings": True,
}


@rt.function
def thoughts(s: Any, question: Any) -> None:
    s += "A text that many will read, long enough to be worth keeping. " * 3
    s += "Question: " + question + "\n"
    branches = s.fork(3)
    for i, branch in enumerate(branches):
        branch += f"Thought {i}:" + rt.gen("first", max_tokens=12, ignore_eos=True)
        branch += "\nFurther:" + rt.gen("second", max_tokens=8, ignore_eos=True)
        branch += "\nGood? " + rt.select("verdict", ["yes", "no", "yes, but"])
    s += "1. " + branches[0]["first"] + "\n2. " + branches[1]["first"] + "\nBest: "
    s += rt.select("best", ["1", "2"]) + rt.gen("end", max_tokens=6, ignore_eos=True)


def answers(folder: Path, tokens: int, policy: str, eviction: str) -> list[tuple[Any, ...]]:
    with rt.Runtime(
        str(folder / "config.json"),
        load_format="dummy",
        tokenizer_path="smollm2-135m-instruct",
        dtype="float32",
        max_total_tokens=tokens,
        schedule_policy=policy,
        radix_eviction_policy=eviction,
        random_seed=3,
    ) as runtime:
        arguments = [{"question": f"number {i}?"} for i in range(8)]
        compiled = thoughts.compile().run_batch(arguments, backend=runtime, temperature=0.0)
        lazy = thoughts.run_batch(arguments, backend=runtime, temperature=0.0, num_threads=8)
        found = [(state.text(), state["best"], state["end"]) for state in (*compiled, *lazy)]
        assert runtime.server_info()["requests"]["waiting"] == 0
    assert found[:8] == found[8:], "compiled and lazy programs say the same"
    return found


def test_programs_give_the_same_with_every_policy_and_eviction(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY), "utf-8")
    plain = answers(tmp_path, 16384, "fcfs", "lru")
    assert len(set(plain)) > 4
    for policy, eviction in (("program", "program"), ("lpm", "lfu"), ("dfs", "program")):
        small = 384  # of what eight programs at once would hold, a fraction
        assert answers(tmp_path, small, policy, eviction) == plain, (policy, eviction)


@pytest.mark.parametrize("tokens", [320])
def test_more_programs_than_memory_holds_all_finish(tmp_path: Path, tokens: int) -> None:
    """More streams at a time than memory holds, each wished for until its program has ended."""
    (tmp_path / "config.json").write_text(json.dumps(TINY), "utf-8")

    @rt.function
    def hold(s: Any, i: int) -> None:
        s += f"Number {i}. " * 20 + rt.gen("a", max_tokens=4, ignore_eos=True)

    with rt.Runtime(
        str(tmp_path / "config.json"),
        load_format="dummy",
        tokenizer_path="smollm2-135m-instruct",
        dtype="float32",
        max_total_tokens=tokens,
        schedule_policy="program",
        radix_eviction_policy="program",
    ) as runtime:
        states = hold.run_batch([{"i": i} for i in range(12)], backend=runtime, num_threads=12)
        assert all(len(state["a"]) > 0 for state in states)
