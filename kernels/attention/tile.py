"""What the attention kernels share: scores of a tile of keys, and the running softmax over tiles.

Scores are kept in the base-2 logarithm (times log2 e), so that one `exp2` is all a weight costs.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def inner_mask(d, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """[1, BLOCK_D]: which dimensions there are; a constant where all are."""
    if D == BLOCK_D:
        return tl.full([1, BLOCK_D], 1, dtype=tl.int1)
    return (d < D)[None, :]


@triton.jit
def scores(q, k, scale, cap, CAPPED: tl.constexpr):
    """q [M, D] times k [N, D] transposed: [M, N] float32, scaled, capped, times log2 e."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if CAPPED:
        # cap * tanh(z) with tanh(z) = 2 sigmoid(2 z) - 1
        return (2.0 * tl.sigmoid(s * (2.0 * scale / cap)) - 1.0) * (cap * 1.4426950408889634)
    return s * (scale * 1.4426950408889634)


@triton.jit
def accumulate(s, v, top, total, acc, GUARD: tl.constexpr):
    """Take scores [M, N] and values [N, D] into (top [M], total [M], acc [M, D]).

    GUARD is needed where a row may have seen no key yet: -inf less -inf would be NaN.
    """
    highest = tl.maximum(top, tl.max(s, axis=1))
    base = tl.where(highest == float("-inf"), 0.0, highest) if GUARD else highest
    weight = tl.exp2(s - base[:, None])
    decay = tl.exp2(top - base)
    total = total * decay + tl.sum(weight, axis=1)
    acc = acc * decay[:, None]
    acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
    return highest, total, acc


@triton.jit
def finish(top, total, acc):
    """(output [M, D], natural log-sum-exp [M]); rows that saw no key give zeros and -inf."""
    seen = total > 0.0
    divisor = tl.where(seen, total, 1.0)
    lse = tl.where(seen, (top + tl.log2(divisor)) * 0.6931471805599453, float("-inf"))
    return tl.where(seen[:, None], acc / divisor[:, None], 0.0), lse
