"""Block formats against the library of the format, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from ramet.runtime.model.loader.dequantize import dequantize
from ramet.runtime.model.loader.gguf import TENSOR_TYPES

BLOCK_TYPES = [name for name, block, _ in TENSOR_TYPES.values() if block > 1]
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}


def random_blocks(name: str, blocks: int, seed: int) -> np.ndarray:
    """[blocks, bytes] with every bit random but for scales, which are finite."""
    rng = np.random.default_rng(seed)
    size = next(size for known, _, size in TENSOR_TYPES.values() if known == name)
    data = rng.integers(0, 256, (blocks, size), dtype=np.uint8)
    for at in HALVES[name]:
        data[:, at : at + 2] = rng.normal(0, 1, blocks).astype(np.float16)[:, None].view(np.uint8)
    return data


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_blocks(name: str) -> None:
    block = next(block for known, block, _ in TENSOR_TYPES.values() if known == name)
    data = random_blocks(name, 64, seed=1)
    kind = gguf.GGMLQuantizationType[name]
    expected = gguf.dequantize(data.reshape(4, -1), kind)
    got = dequantize(torch.from_numpy(data.reshape(-1)), name, (4, 16 * block))
    assert got.dtype == torch.float32
    np.testing.assert_array_equal(got.numpy().view(np.uint32), expected.view(np.uint32))


def test_every_block_type_is_tried() -> None:
    assert set(BLOCK_TYPES) == set(HALVES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_plain_numbers_are_views(dtype: torch.dtype) -> None:
    name = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
    numbers = torch.arange(12).to(dtype)
    raw = numbers.view(torch.uint8)
    got = dequantize(raw, name, (3, 4))
    assert got.dtype == dtype
    assert got.data_ptr() == raw.data_ptr()
    torch.testing.assert_close(got, numbers.view(3, 4))
