"""SmolLM2 on the GPU: the oracle's tokens in float32, near it in bf16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

CASES = json.loads((Path(__file__).parents[1] / "cases" / "smollm2_greedy.json").read_text())


@pytest.fixture(scope="module")
def files():
    from ramet.runtime.model.store import resolve
    from ramet.runtime.protocol import ModelError

    try:
        return resolve("smollm2-135m-instruct", fetch=False)
    except ModelError:
        pytest.skip("SmolLM2 is not on this machine")


def make(files, dtype):
    from ramet.runtime.model.config import ModelConfig
    from ramet.runtime.model.device_runner import DeviceRunner
    from ramet.runtime.model.loader.weights import load_weights

    config = ModelConfig.load(files)
    runner = DeviceRunner(
        config, load_weights(files, config, dtype, "cuda"), dtype=dtype, max_rows=16,
        context_length=2048, device=torch.device("cuda"),
    )  # fmt: skip
    runner.take_memory(8192 + 16)
    runner.capture(16)
    return runner


@pytest.mark.model
@pytest.mark.parametrize("step_tokens", [32, 512])
def test_float32_gives_the_oracles_tokens(files, step_tokens, drive):
    runner = make(files, torch.float32)
    driver = drive(runner, slots=8192, rows=16, context=2048, step_tokens=step_tokens)
    for _ in ("cold", "warm"):
        rids = {
            case["id"]: driver.add(case["prompt_token_ids"], 48, stop_ids=(2,), logprobs=True)
            for case in CASES["cases"]
        }
        driver.run()
        for case in CASES["cases"]:
            want, have = case["output_token_ids"], driver.tokens[rids[case["id"]]]
            same = next((i for i, (a, b) in enumerate(zip(want, have)) if a != b), len(want))
            assert same == len(want) or case["min_top1_top2_margin"] < 1e-3, case["id"]
            for a, b in zip(case["output_logprobs"][:same], driver.logprobs[rids[case["id"]]]):
                assert abs(a - b) < 1e-3
    runner.close()


@pytest.mark.model
def test_bf16_logprobs_of_a_forced_continuation_are_near(files, drive):
    scores = []
    for dtype in (torch.float32, torch.bfloat16):
        runner = make(files, dtype)
        driver = drive(runner, slots=8192, rows=16, context=2048)
        found: list[float] = []
        for case in CASES["cases"]:
            ids = case["prompt_token_ids"] + case["output_token_ids"]
            start = len(case["prompt_token_ids"])
            rid = driver.add(ids, 0, logprobs=True, logprob_start=start)
            driver.run()
            found += driver.prompt_logprobs[rid]
        scores.append(found)
        runner.close()
    gaps = [abs(a - b) for a, b in zip(*scores)]
    assert len(gaps) > 300
    print(f"bf16: mean {sum(gaps) / len(gaps):.4f}, largest {max(gaps):.4f}")
    assert sum(gaps) / len(gaps) < 0.02
    assert max(gaps) < 0.25
