"""The benchmarks' own modules: they are scripts, no package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="session")
def traces() -> ModuleType:
    return _module("radix_trace")


@pytest.fixture(scope="session")
def simulate() -> ModuleType:
    return _module("radix_simulate")


@pytest.fixture(scope="session")
def bench_module():
    """Any other, by name."""
    return _module


def _module(name: str) -> ModuleType:
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))
