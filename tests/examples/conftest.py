from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import ramet as rt

FOLDER = Path(__file__).parents[2] / "examples"


@pytest.fixture
def folder() -> Path:
    return FOLDER


@pytest.fixture
def example() -> Iterator[Callable[[str], ModuleType]]:
    """Loads an example by its name."""
    loaded: list[str] = []

    def load(name: str) -> ModuleType:
        unique = f"example_{name}"
        spec = importlib.util.spec_from_file_location(unique, FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[unique] = module
        loaded.append(unique)
        spec.loader.exec_module(module)
        return module

    yield load
    for unique in loaded:
        sys.modules.pop(unique, None)


@pytest.fixture
def scripted() -> Callable[..., rt.testing.ScriptedBackend]:
    """Makes a backend that answers from a script."""
    return rt.testing.ScriptedBackend


@pytest.fixture(scope="session")
def runtime() -> Iterator[Any]:
    """The real model, once for the whole folder."""
    with rt.Runtime("smollm2-135m-instruct", dtype="float32", max_total_tokens=16384) as runtime:
        yield runtime
