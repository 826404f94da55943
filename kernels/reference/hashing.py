"""The random number of a draw: a hash that any device repeats bit for bit."""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF


def _mix(h: torch.Tensor) -> torch.Tensor:
    """The 32-bit finalizer of MurmurHash3, on int64 tensors that hold uint32 values.

    An int64 product wraps modulo 2^64, so its low 32 bits are those of the uint32 product.
    """
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & _MASK
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE35) & _MASK
    return h ^ (h >> 16)


def uniform(seeds: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """[S] float32 in [0, 1) with 24 random bits, from ``seeds`` [S] int64 and ``steps`` [S] >= 0.

    In uint32 arithmetic, with lo and hi the halves of the seed: ``h = mix(lo + 0x9E3779B9)``, then
    ``mix(h ^ hi)``, ``mix(h + step * 0x9E3779B1)``, ``mix(h ^ step)``; the result is
    ``(h >> 8) * 2^-24``.
    """
    seeds, steps = seeds.to(torch.int64), steps.to(torch.int64) & _MASK
    lo, hi = seeds & _MASK, (seeds >> 32) & _MASK
    h = _mix((lo + 0x9E3779B9) & _MASK)
    h = _mix(h ^ hi)
    h = _mix((h + steps * 0x9E3779B1) & _MASK)
    h = _mix(h ^ steps)
    return (h >> 8).to(torch.float32) * 2.0**-24
