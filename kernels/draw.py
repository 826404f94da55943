"""The parts of a draw that both paths of `sampling` share: the random number, thresholds, the
inverse of a sum."""

from __future__ import annotations

import triton
import triton.language as tl

PART = tl.constexpr(256)


@triton.jit
def mix(h):
    """The 32-bit finalizer of MurmurHash3."""
    h ^= h >> 16
    h *= 0x85EBCA6B
    h ^= h >> 13
    h *= 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def uniform_of(seed, step):
    """A float32 in [0, 1) of 24 random bits, from a seed (int64) and a step; as
    `reference.hashing.uniform`."""
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    step = step.to(tl.uint32)
    h = mix(low + tl.full([], 0x9E3779B9, tl.uint32))
    h = mix(h ^ high)
    h = mix(h + step * tl.full([], 0x9E3779B1, tl.uint32))
    h = mix(h ^ step)
    return (h >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def weight_of(x, largest, scale):
    """exp((x - largest) * scale): 1 for the largest even if infinite, 0 for what is not a
    number."""
    weight = tl.where(x == largest, 1.0, tl.exp((x - largest) * scale))
    return tl.where(weight == weight, weight, 0.0)


@triton.jit
def pick_short(weights, ids, target, N: tl.constexpr):
    """`pick` by one running sum."""
    n = tl.arange(0, N)
    reached = tl.sum((tl.cumsum(weights, axis=0) <= target).to(tl.int32), axis=0)
    last = tl.max(tl.where(weights > 0, n, 0), axis=0)
    return tl.sum(tl.where(n == tl.minimum(reached, last), ids, 0), axis=0)


@triton.jit
def pick(weights, ids, target, N: tl.constexpr):
    """The id at which the running sum of weights [N] first exceeds target, else the last of
    positive weight.

    Long sums go in two levels: thousands of small numbers added to a large one would lose too many
    bits.
    """
    if N <= PART:
        token = pick_short(weights, ids, target, N)
    else:
        PARTS: tl.constexpr = N // PART
        part = tl.arange(0, PARTS)
        square = tl.reshape(weights, [PARTS, PART])
        sums = tl.sum(square, axis=1)
        chosen = pick_short(sums, part, target, PARTS)
        before = tl.sum(tl.where(part < chosen, sums, 0.0), axis=0)
        mine = (part == chosen)[:, None]
        inner = tl.sum(tl.where(mine, square, 0.0), axis=0)
        inner_ids = tl.sum(tl.where(mine, tl.reshape(ids, [PARTS, PART]), 0), axis=0)
        token = pick_short(inner, inner_ids, target - before, PART)
    return token


@triton.jit
def edge_by_mass(weights, need):
    """Largest t for which the weights of at least t sum to `need` or more; 0 if they never do.

    Built from the top bit down: float32 values that are not negative are ordered as their bits are.
    """
    bits = weights.to(tl.int32, bitcast=True)
    edge = (need * 0.0).to(tl.int32)
    for i in range(30):
        trial = edge | (1 << (29 - i))
        mass = tl.sum(tl.where(bits >= trial, weights, 0.0), axis=0)
        edge = tl.where(mass >= need, trial, edge)
    return edge.to(tl.float32, bitcast=True)


@triton.jit
def edge_by_count(weights, need):
    """Largest t that at least `need` weights reach; 0 if so many there are not."""
    bits = weights.to(tl.int32, bitcast=True)
    edge = need * 0
    for i in range(30):
        trial = edge | (1 << (29 - i))
        count = tl.sum((bits >= trial).to(tl.int32), axis=0)
        edge = tl.where(count >= need, trial, edge)
    return edge.to(tl.float32, bitcast=True)
