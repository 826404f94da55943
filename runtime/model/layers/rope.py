"""Tables of rotary positions: what config.json calls rope scaling, worked out once."""

from __future__ import annotations

import math

import torch

from ..config import RopeConfig


def rope_table(
    rope: RopeConfig, head_dim: int, length: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """[length, R] float32 for positions 0 to length - 1: R/2 cosines, then R/2 sines, where R is
    the number of rotated dims of a head."""
    frequencies, scale = inverse_frequencies(rope, head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(scale).to(device)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """[R/2] float32 radians a position, and what cosines and sines are multiplied by.

    An angle is position times frequency, so a last bit that differs here shows at far positions:
    the order of operations is the one that models were trained with.
    """
    size = int(head_dim * rope.partial_factor)
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    periods = rope.theta**exponents
    plain = 1.0 / periods
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, periods), _yarn_scale(rope)
    if rope.kind == "factors":
        return plain / torch.tensor(rope.factors, dtype=torch.float32), 1.0
    return plain, 1.0


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended."""
    turns = rope.original_context / (2 * math.pi / plain)
    span = rope.high_freq_factor - rope.low_freq_factor
    keep = ((turns - rope.low_freq_factor) / span).clamp(0.0, 1.0)
    return (1 - keep) * plain / rope.factor + keep * plain


def _yarn(rope: RopeConfig, periods: torch.Tensor) -> torch.Tensor:
    """Dims that turn more than ``beta_fast`` times over the first context are kept, those that turn
    less than ``beta_slow`` times are stretched, with a ramp between."""

    size = 2 * len(periods)

    def dim_of(turns: float) -> float:
        wavelengths = rope.original_context / (turns * 2 * math.pi)
        return size * math.log(wavelengths) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = torch.arange(size // 2, dtype=torch.float32)
    kept = 1 - ((ramp - low) / (high - low)).clamp(0.0, 1.0)
    return 1.0 / (rope.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _yarn_scale(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)
