"""ggml's block formats to float32, whole tensors at a time, on whichever device the bytes are.

A block is a few scales and packed integers; every function takes the blocks as rows of bytes,
[blocks, bytes a block] uint8, and gives [blocks, values a block] float32. The order of the
roundings is ggml's, so that the values equal its own bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .gguf import TENSOR_TYPES


def dequantize(raw: Tensor, type_name: str, shape: tuple[int, ...]) -> Tensor:
    """``raw``: [nbytes] uint8, contiguous, of a tensor of a ggml type → ``shape`` float32.

    Types that are plain numbers come back in their own dtype, viewing ``raw``.
    """
    if type_name in _PLAIN:
        return raw.view(_PLAIN[type_name]).view(shape)
    block_bytes = next(size for name, _, size in TENSOR_TYPES.values() if name == type_name)
    return _BLOCKS[type_name](raw.view(-1, block_bytes)).view(shape)


def _half(blocks: Tensor, at: int) -> Tensor:
    """[blocks, 1] float32 of the half-precision number at byte ``at``."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor, out: Tensor) -> Tensor:
    """[blocks, n] bytes into [blocks, 2n]: all low halves, then all high ones."""
    half = packed.shape[1]
    torch.bitwise_and(packed, 15, out=out[:, :half])
    torch.bitwise_right_shift(packed, 4, out=out[:, half:])
    return out


def _fifth_bits(packed: Tensor, blocks: Tensor, at: int) -> Tensor:
    """The 32 values of a five-bit block: nibbles, and bit j of the 32-bit word at byte ``at``."""
    low = _nibbles(packed, packed.new_empty(len(packed), 32))
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    bits = blocks[:, at : at + 4].unsqueeze(-1).bitwise_right_shift(shifts).bitwise_and_(1)
    return low.bitwise_or_(bits.view(-1, 32).bitwise_left_shift_(4))


def _q4_0(blocks: Tensor) -> Tensor:
    packed = blocks[:, 2:]
    values = _nibbles(packed, packed.new_empty(len(packed), 32)).float()
    return values.sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    packed = blocks[:, 4:]
    values = _nibbles(packed, packed.new_empty(len(packed), 32)).float()
    return values.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor) -> Tensor:
    return _fifth_bits(blocks[:, 6:], blocks, 2).float().sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    values = _fifth_bits(blocks[:, 8:], blocks, 4).float()
    return values.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def _sub_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """[blocks, 12] bytes hold eight 6-bit scales and eight 6-bit minima: each [blocks, 8] float32.

    The first four of each lie in the low six bits of bytes 0-3 and 4-7; the last four have their
    low halves in bytes 8-11 and their top two bits above the first ones.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), 1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), 1)
    return scales.float(), minima.float()


def _k_values(blocks: Tensor, nibbles_at: int) -> Tensor:
    """[blocks, 8, 32] uint8: 32 bytes hold one sub-block in their low halves, the next above."""
    packed = blocks[:, nibbles_at : nibbles_at + 128].view(-1, 4, 1, 32)
    shifts = torch.tensor([0, 4], dtype=torch.uint8, device=blocks.device).view(1, 1, 2, 1)
    return packed.bitwise_right_shift(shifts).bitwise_and_(15).view(-1, 8, 32)


def _k_finish(blocks: Tensor, values: Tensor) -> Tensor:
    scales, minima = _sub_scales(blocks[:, 4:16])
    scale = scales.mul_(_half(blocks, 0)).unsqueeze(-1)
    minimum = minima.mul_(_half(blocks, 2)).unsqueeze(-1)
    return values.float().mul_(scale).sub_(minimum).view(-1, 256)


def _q4_k(blocks: Tensor) -> Tensor:
    return _k_finish(blocks, _k_values(blocks, 16))


def _q5_k(blocks: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(1, 8, 1)
    top = blocks[:, 16:48].unsqueeze(1).bitwise_right_shift(shifts).bitwise_and_(1)
    return _k_finish(blocks, _k_values(blocks, 48).bitwise_or_(top.bitwise_left_shift_(4)))


def _q6_k(blocks: Tensor) -> Tensor:
    """Two halves of 128 values: 64 bytes of low nibbles, 32 bytes of the two bits above them."""
    device = blocks.device
    low_shift = torch.tensor([0, 4], dtype=torch.uint8, device=device).view(1, 1, 2, 1)
    top_shift = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=device).view(1, 1, 4, 1)
    low = blocks[:, :128].view(-1, 2, 1, 64).bitwise_right_shift(low_shift).bitwise_and_(15)
    top = blocks[:, 128:192].view(-1, 2, 1, 32).bitwise_right_shift(top_shift).bitwise_and_(3)
    values = low.view(-1, 256) | top.bitwise_left_shift_(4).view(-1, 256)
    scale = blocks[:, 192:208].contiguous().view(torch.int8).float().mul_(_half(blocks, 208))
    return values.float().sub_(32).view(-1, 16, 16).mul_(scale.unsqueeze(-1)).view(-1, 256)


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCKS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
