"""Servers for clients that nobody here wrote: one with the real model, one that repeats."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ramet.runtime import launch

ROOT = Path(__file__).parent.parent.parent
PYTHON = ROOT / ".venv/clients/bin/python"
# Without it litellm looks for a list of prices on the network when it is imported.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")


@pytest.fixture(scope="session")
def stub() -> Any:
    """The module of the engine without a model; ``stub.launched`` starts a server of it."""
    spec = importlib.util.spec_from_file_location("stub_engine", ROOT / "benchmarks/stub_engine.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def echo(stub: Any) -> Iterator[str]:
    """The address of a server whose model, ``echo``, answers with what its prompt holds between [[
    and ]]."""
    with stub.launched("--echo", "--rate", "1000", served_model_name="echo") as running:
        yield running.url


@pytest.fixture(scope="module")
def served() -> Iterator[launch.Launched]:
    """The real model under the name ``any/name:v1``, in float32."""
    settings = {
        "model_path": "smollm2-135m-instruct", "dtype": "float32", "max_total_tokens": 32_768,
        "context_length": 4096, "served_model_name": "any/name:v1", "random_seed": 7,
        "port": 0, "zmq_port": 0,
    }  # fmt: skip
    running = launch.start(settings, listen=True)
    yield running
    running.stop()


@pytest.fixture
def elsewhere(tmp_path: Path) -> Callable[..., Any]:
    """Runs a script by the environment of the clients that clash with ours; what it printed last,
    as JSON."""
    if not PYTHON.exists():
        assert not os.environ.get("CI"), "`make setup` makes .venv/clients"
        pytest.skip("`make setup` makes .venv/clients")

    def run(script: str, *arguments: str) -> Any:
        path = tmp_path / "script.py"
        path.write_text(script)
        offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "OPENAI_API_KEY": "none"}
        done = subprocess.run(
            [str(PYTHON), "-P", str(path), *arguments],
            capture_output=True,
            text=True,
            timeout=240,
            env={**os.environ, **offline},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run
