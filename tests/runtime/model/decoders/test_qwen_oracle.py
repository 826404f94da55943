"""A real Qwen 2.5 in float32: biases on q, k and v, Q4_K, and a large vocabulary's tokenizer.

It is in no catalog: ``RAMET_TEST_QWEN05`` names a GGUF of Qwen2.5-Coder-0.5B-Instruct, Q4_K_M.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ramet.runtime.gateway.tokenizer import Tokenizer
from ramet.runtime.model import store
from ramet.runtime.model.config import ModelConfig
from ramet.runtime.model.host_runner import HostRunner
from ramet.runtime.model.loader.weights import load_weights

FILE = os.environ.get("RAMET_TEST_QWEN05", "")
SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.skipif(not FILE, reason="RAMET_TEST_QWEN05 names no file"),
]

CASES = json.loads((Path(__file__).parents[3] / "cases" / "qwen05_greedy.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def files() -> Any:
    with Path(FILE).open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == SHA256, f"{FILE} is another file"
    return store.resolve(FILE)


@pytest.fixture(scope="module")
def runner(files: Any) -> HostRunner:
    config = ModelConfig.load(files)

    def rounded() -> Iterator[tuple[str, torch.Tensor]]:
        """The expected tokens are those of weights that were kept in bfloat16."""
        for name, weight in load_weights(files, config, torch.bfloat16):
            yield name, weight.float()

    return HostRunner(
        config, rounded(), dtype=torch.float32, num_slots=2048, max_rows=4, context_length=1024
    )


def test_prompts_are_cut_alike(files: Any) -> None:
    tokenizer = Tokenizer.from_files(files)
    for case in CASES["cases"]:
        assert tokenizer.encode(case["prompt"]) == case["prompt_token_ids"], case["id"]


def test_greedy(runner: HostRunner, driver: Any, request_of: Any) -> None:
    cases = CASES["cases"]
    requests = [request_of(c["prompt_token_ids"], len(c["output_token_ids"])) for c in cases]
    for case, request in zip(cases, driver(runner, scatter=True).run(requests)):
        assert request.output == case["output_token_ids"], case["id"]
        assert np.allclose(request.logprobs, case["output_logprobs"], atol=1e-3)
