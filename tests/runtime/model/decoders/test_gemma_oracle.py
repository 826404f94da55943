"""The real Gemma 3 in float32: offset norms, two ropes, a window, Q4_K and its neighbours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ramet.runtime.model import catalog, store
from ramet.runtime.model.config import ModelConfig
from ramet.runtime.model.host_runner import HostRunner
from ramet.runtime.model.loader.weights import load_weights

pytestmark = [pytest.mark.model, pytest.mark.slow]

CASES = json.loads((Path(__file__).parents[3] / "cases" / "gemma3_greedy.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def runner() -> HostRunner:
    entry = catalog.find("gemma3-270m")
    assert entry is not None
    if store.cached_path(entry) is None:
        pytest.skip("gemma3-270m is not fetched (`ramet models fetch gemma3-270m`)")
    files = store.resolve("gemma3-270m")
    config = ModelConfig.load(files)
    return HostRunner(
        config,
        load_weights(files, config, torch.float32),
        dtype=torch.float32,
        num_slots=2048,
        max_rows=4,
        context_length=1024,
    )


def test_greedy(runner: HostRunner, driver: Any, request_of: Any) -> None:
    cases = CASES["cases"]
    requests = [request_of(c["prompt_token_ids"], len(c["output_token_ids"])) for c in cases]
    for case, request in zip(cases, driver(runner, scatter=True).run(requests)):
        assert request.output == case["output_token_ids"], case["id"]
        assert np.allclose(request.logprobs, case["output_logprobs"], atol=1e-3)
