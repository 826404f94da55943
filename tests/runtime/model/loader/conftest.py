"""Small GGUF files, written by the library that defines the format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

WriteGGUF = Callable[..., Path]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGGUF:
    """Write a file of an architecture: integer and float metadata, and float32 tensors."""

    def write(
        architecture: str = "llama",
        values: dict[str, int | float] | None = None,
        tensors: dict[str, np.ndarray] | None = None,
    ) -> Path:
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        for key, value in (values or {}).items():
            if isinstance(value, int):
                writer.add_uint32(f"{architecture}.{key}", value)
            else:
                writer.add_float32(f"{architecture}.{key}", value)
        writer.add_array("test.words", ["one", "zwei", "三"])
        writer.add_array("test.numbers", [1, 2, 3])
        for name, tensor in (tensors or {}).items():
            writer.add_tensor(name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
