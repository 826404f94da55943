"""Reading GGUF headers, and refusing whatever is not whole."""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from ramet.runtime.model.config import ModelConfig
from ramet.runtime.model.loader.gguf import GGUFFile
from ramet.runtime.protocol.errors import ModelError

TENSORS = {
    "token_embd.weight": np.zeros((6, 16), np.float32),
    "a.weight": np.arange(64, dtype=np.float32).reshape(4, 16),
    "b.weight": np.linspace(-1, 1, 8, dtype=np.float32),
}


@pytest.fixture
def path(write_gguf: Callable[..., Path]) -> Path:
    values = {"block_count": 3, "embedding_length": 16, "attention.head_count": 2}
    values |= {"context_length": 64, "feed_forward_length": 8, "rope.dimension_count": 8}
    return write_gguf("llama", {**values, "rope.freq_base": 1e5}, TENSORS)


def test_values_and_tensors(path: Path) -> None:
    file = GGUFFile(path)
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.block_count"] == 3
    assert file.metadata["test.words"] == ["one", "zwei", "三"]
    assert list(file.metadata["test.numbers"]) == [1, 2, 3]
    assert list(file.tensors) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert file.tensors[name].shape == tensor.shape
        np.testing.assert_array_equal(file.raw(name).view(np.float32).reshape(tensor.shape), tensor)


def test_the_file_stays_as_it_is(path: Path) -> None:
    before = path.read_bytes()
    file = GGUFFile(path)
    file.raw("a.weight")[:] = 255
    del file
    assert path.read_bytes() == before


def test_every_truncation_is_an_error(path: Path, tmp_path: Path) -> None:
    whole = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    end_of_data = max(t.start + t.nbytes for t in GGUFFile(path).tensors.values())
    for length in range(0, end_of_data, 3):
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            GGUFFile(cut)


def test_damage_is_an_error_or_harmless(path: Path, tmp_path: Path) -> None:
    """Any byte changed, and any eight bytes replaced by a huge number, never crash the reader."""
    whole = path.read_bytes()
    header = GGUFFile(path).tensors["token_embd.weight"].start
    damaged = tmp_path / "damaged.gguf"
    rng = random.Random(0)
    huge = [2**64 - 1, 2**63, 2**62 + 8, 2**40, 2**32 - 1]
    for _ in range(600):
        data = bytearray(whole)
        if rng.random() < 0.5:
            data[rng.randrange(header)] = rng.randrange(256)
        else:
            struct.pack_into("<Q", data, rng.randrange(header - 8), rng.choice(huge))
        damaged.write_bytes(data)
        try:
            file = GGUFFile(damaged)
        except ModelError:
            continue
        for name, tensor in file.tensors.items():
            assert len(file.raw(name)) == tensor.nbytes
        with contextlib.suppress(ModelError):
            ModelConfig.from_gguf(file)


def test_what_is_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"")
    with pytest.raises(ModelError, match=r"x\.gguf"):
        GGUFFile(path)
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelError, match="does not start with GGUF"):
        GGUFFile(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(ModelError, match="version 1"):
        GGUFFile(path)
    with pytest.raises(ModelError, match=r"missing\.gguf"):
        GGUFFile(tmp_path / "missing.gguf")


def header(*tensors: bytes, values: bytes = b"", count: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, len(tensors), count) + values + b"".join(tensors)


def tensor(name: str, kind: int, offset: int, *dims: int) -> bytes:
    text = name.encode()
    shape = struct.pack(f"<{len(dims)}Q", *dims)
    start = struct.pack("<Q", len(text)) + text + struct.pack("<I", len(dims)) + shape
    return start + struct.pack("<IQ", kind, offset)


BAD = {
    "ggml type 99": header(tensor("t", 99, 0, 32)),
    "do not fill Q4_0": header(tensor("t", 2, 0, 31)),
    "the file ends at": header(tensor("t", 0, 2**63, 4)),
    "should end at": header(tensor("t", 0, 0, 2**32, 2**31)),
    "5 dimensions": header(tensor("t", 0, 0, 1, 1, 1, 1, 1)),
    "appears twice": header(tensor("t", 0, 0, 1), tensor("t", 0, 0, 1)) + bytes(64),
    "unknown value type 77": header(
        values=struct.pack("<Q", 1) + b"k" + struct.pack("<I", 77), count=1
    )
    + bytes(32),
    "not UTF-8": header(values=struct.pack("<Q", 1) + b"\xff" + bytes(20), count=1),
    "nested deeper": header(
        values=struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 40,
        count=1,
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_lies_in_the_header(message: str, tmp_path: Path) -> None:
    path = tmp_path / "lie.gguf"
    path.write_bytes(BAD[message])
    with pytest.raises(ModelError, match=message):
        GGUFFile(path)
