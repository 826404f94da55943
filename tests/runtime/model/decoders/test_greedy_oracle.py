"""The real SmolLM2 in float32 against the greedy cases, in every shape of step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ramet.runtime.model.config import ModelConfig
from ramet.runtime.model.host_runner import HostRunner
from ramet.runtime.model.loader.weights import load_weights
from ramet.runtime.model.store import resolve

pytestmark = pytest.mark.model

CASES = json.loads(
    (Path(__file__).parents[3] / "cases" / "smollm2_greedy.json").read_text("utf-8")
)["cases"]


def make_runner(dtype: torch.dtype) -> HostRunner:
    files = resolve("smollm2-135m-instruct")
    config = ModelConfig.load(files)
    return HostRunner(
        config,
        load_weights(files, config, dtype),
        dtype=dtype,
        num_slots=4096,
        max_rows=16,
        context_length=512,
    )


@pytest.fixture(scope="module")
def runner() -> HostRunner:
    return make_runner(torch.float32)


def check(case: dict[str, Any], request: Any) -> None:
    assert case["min_top1_top2_margin"] >= 1e-3
    assert request.output == case["output_token_ids"], case["id"]
    assert np.allclose(request.logprobs, case["output_logprobs"], atol=1e-3)
    want = [v for v in case["prompt_logprobs"] if v is not None]
    assert np.allclose(request.prompt_logprobs, want, atol=1e-3)


def request_for(case: dict[str, Any], request_of: Any) -> Any:
    stop = (case["output_token_ids"][-1],) if case["finish_reason"] == "stop" else ()
    return request_of(case["prompt_token_ids"], 48, stop_ids=stop)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_alone(case: dict[str, Any], runner: HostRunner, driver: Any, request_of: Any) -> None:
    check(case, *driver(runner, scatter=True).run([request_for(case, request_of)]))


@pytest.mark.parametrize("chunk", [1 << 30, 32], ids=["whole", "chunked"])
def test_all_together(runner: HostRunner, driver: Any, request_of: Any, chunk: int) -> None:
    requests = [request_for(case, request_of) for case in CASES]
    for case, request in zip(CASES, driver(runner, chunk=chunk).run(requests)):
        check(case, request)


def test_bf16_logprobs_of_a_forced_continuation_are_near(driver: Any, request_of: Any) -> None:
    runner = make_runner(torch.bfloat16)
    gaps: list[float] = []
    for case in CASES:
        ids = case["prompt_token_ids"] + case["output_token_ids"]
        (request,) = driver(runner).run([request_of(ids, 1)])
        found = request.prompt_logprobs[len(case["prompt_token_ids"]) - 1 :]
        gaps += [abs(a - b) for a, b in zip(found, case["output_logprobs"], strict=True)]
    assert np.mean(gaps) < 0.02
    assert max(gaps) < 0.25
