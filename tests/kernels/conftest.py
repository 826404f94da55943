"""Kernel tests: compiled where there is a GPU, else under Triton's interpreter.

Triton decides between the two when a kernel's module is imported, so the interpreted run is a
pytest of its own: ``TRITON_INTERPRET=1 pytest tests/kernels``. Without a GPU and without that
variable these tests are skipped, but for test_compile.py, which starts processes of its own.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available() and not INTERPRETED

if INTERPRETED:
    _spec = importlib.util.spec_from_file_location(
        "kernel_test_interpreter", Path(__file__).with_name("interpreter.py")
    )
    assert _spec and _spec.loader
    _module = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_module)
    _module.mend()
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here not in item.path.parents:
            continue
        compiles = item.path.name == "test_compile.py"
        if compiles and INTERPRETED:
            item.add_marker(pytest.mark.skip(reason="done by the run without TRITON_INTERPRET"))
        elif not (compiles or INTERPRETED or ON_GPU):
            reason = "needs a GPU, or TRITON_INTERPRET=1 in the environment (a run of its own)"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture(scope="session")
def on_gpu() -> bool:
    """Whether shapes may be large."""
    return ON_GPU


TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.double().cpu(), want.double().cpu()
    assert got.shape == want.shape, (got.shape, want.shape)
    assert torch.isfinite(got).all(), "the result holds NaN or infinity"
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


@pytest.fixture(scope="session")
def close() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Assert that a result equals its float64 reference by relative norm, as its dtype allows."""

    def check(got: torch.Tensor, want: torch.Tensor, tolerance: float | None = None) -> None:
        limit = TOLERANCE[got.dtype] if tolerance is None else tolerance
        error = relative_error(got, want)
        assert error < limit, f"relative error {error:.3g} >= {limit:g}"

    return check


@pytest.fixture(scope="session")
def poisoned(device: torch.device) -> Callable[..., torch.Tensor]:
    """A tensor full of NaN, so that an element nobody wrote is seen."""

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full(shape, float("nan"), dtype=torch.float32, device=device).to(dtype)

    return make


def pytest_configure(config: pytest.Config) -> None:
    # Of the interpreter's own code: kernels run through thousands of these.
    for category in ("DeprecationWarning", "RuntimeWarning"):
        line = f"ignore::{category}:triton.runtime.interpreter"
        config.addinivalue_line("filterwarnings", line)
