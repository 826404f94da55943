"""From logits to one token a row: penalties, biases, masks, filters, the draw, log-probs."""

from __future__ import annotations

import numpy as np
import torch

from .hashing import uniform

PROMPT_BIT = 1 << 30
"""Set in a penalty count when the token is in the prompt."""

GREEDY_BELOW = 1e-5
# Weights are at most 1, whose bits are 0x3F800000: sign, exponent and 4 bits more tell buckets.
_BUCKET_SHIFT = 19
_BUCKETS = (0x3F800000 >> _BUCKET_SHIFT) + 1


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [S] int32 of the largest logits; bad [S] bool where a row has a NaN or only -inf."""
    # numpy's argmax takes a tenth of the time of torch's; both find a NaN before anything else.
    ids = torch.from_numpy(logits.float().numpy().argmax(axis=-1))
    bad = ~(logits.gather(1, ids.unsqueeze(1)).squeeze(1) > -torch.inf)
    return ids.masked_fill_(bad, 0).to(torch.int32), bad


def penalize_(
    logits: torch.Tensor,
    index: torch.Tensor,
    counts: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> torch.Tensor:
    """See `Ops.penalize_`."""
    (rows,) = torch.nonzero(index >= 0, as_tuple=True)
    # Few tokens of a vocabulary were seen: only their logits are touched.
    seen = counts.index_select(0, index.index_select(0, rows))
    lines, ids = torch.nonzero(seen, as_tuple=True)
    at = rows.index_select(0, lines)
    output = seen[lines, ids] & (PROMPT_BIT - 1)
    x, by = logits[at, ids], repetition[at]
    x = torch.where(x > 0, x / by, x * by)
    x -= output * frequency[at] + (output > 0) * presence[at]
    return logits.index_put_((at, ids), x)


def add_at_(
    logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """``logits[rows[j], ids[j]] += values[j]``, saturating at float32's largest value."""
    logits.index_put_((rows, ids), values, accumulate=True)
    touched = logits[rows, ids].clamp_(max=torch.finfo(logits.dtype).max)
    return logits.index_put_((rows, ids), touched)


def mask_(
    logits: torch.Tensor,
    mask: torch.Tensor,
    at: torch.Tensor | None = None,
    of: torch.Tensor | None = None,
) -> torch.Tensor:
    """-inf where the bit of ``mask`` [K, ceil(V / 32)] int32 is 0 (bit v % 32 of word v // 32); row
    ``of[i]`` is for logits row ``at[i]``, i without."""
    size = logits.shape[1]
    data = mask.contiguous().numpy().astype("<i4", copy=False).view(np.uint8)
    bits = np.unpackbits(~data, axis=1, count=size, bitorder="little")
    forbidden = torch.from_numpy(bits.view(np.bool_))
    if of is not None:
        forbidden = forbidden.index_select(0, of)
    if at is None:
        return logits.masked_fill_(forbidden, -torch.inf)
    picked = logits.index_select(0, at).masked_fill_(forbidden, -torch.inf)
    return logits.index_copy_(0, at.to(torch.int64), picked)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    steps: torch.Tensor,
    *,
    filtered: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Ops.sample`."""
    best = torch.from_numpy(logits.float().numpy().argmax(axis=-1)).unsqueeze(1)
    values = logits.gather(1, best)
    bad = ~(values > -torch.inf)
    hot = temperature.clamp(min=GREEDY_BELOW).unsqueeze(1)
    # The largest weight is exp(0): filters compare weights, so they need no normalizing sum.
    weights = (logits - values).div_(hot).exp_()
    weights.nan_to_num_(0.0)  # of bad rows, and of +inf - +inf
    weights.scatter_(1, best, 1.0)
    if filtered:
        floor = thresholds(weights, top_k, top_p, min_p)
        weights.masked_fill_(weights < floor.unsqueeze(1), 0)
    sums = weights.cumsum(dim=-1)
    total = sums[:, -1:]
    target = uniform(seeds, steps).unsqueeze(1) * total
    # Below the total even after rounding: the last kept token is the last that can be drawn.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(sums, target, right=True)
    ids = torch.where(temperature.unsqueeze(1) < GREEDY_BELOW, best, drawn)
    return ids.masked_fill_(bad, 0).squeeze(1).to(torch.int32), bad.squeeze(1)


def thresholds(
    weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """[S]: the smallest weight kept of each row of ``weights`` [S, V], whose largest is 1."""
    size = weights.shape[1]
    k = torch.where((top_k <= 0) | (top_k > size), size, top_k).to(torch.int64)
    floor = min_p.clone()
    (rows,) = torch.nonzero((k < size) | (top_p < 1), as_tuple=True)
    if len(rows) == 0:
        return floor
    x, p = weights, top_p
    if len(rows) < len(weights):
        x, k, p = x.index_select(0, rows), k.index_select(0, rows), p.index_select(0, rows)
    count = _candidates(x, k, p)
    edge = _nucleus(x, k, p, count)
    while torch.isnan(edge).any():  # rounding at an edge of the count: look at more of them
        count = min(size, count * 8)
        edge = _nucleus(x, k, p, count)
    floor[rows] = torch.maximum(floor[rows], edge)
    return floor


def _candidates(x: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> int:
    """How many of the largest weights settle every row: a sort of them all would take longest.

    For top-p, mass is summed by the leading bits of the weights, which order as the weights do.
    """
    size = x.shape[1]
    by_k = torch.where(k < size, k, 0)
    count = max(1, int(by_k.max()))
    (rows,) = torch.nonzero((k == size) & (p < 1), as_tuple=True)
    if len(rows) == 0:
        return count
    if len(rows) < len(x):
        x, p = x.index_select(0, rows), p.index_select(0, rows)
    leading = (x.view(torch.int32) >> _BUCKET_SHIFT).long()
    mass = torch.zeros((len(rows), _BUCKETS), dtype=torch.float64)
    mass.scatter_add_(1, leading, x.double())
    above = mass.flip(1).cumsum(1)
    need = p.unsqueeze(1) * above[:, -1:]
    bucket = _BUCKETS - 1 - (above < need).sum(dim=1, keepdim=True)
    inside = (leading >= bucket).sum(dim=1)
    return min(size, max(count, int(inside.max()) + 1))


def _nucleus(x: torch.Tensor, k: torch.Tensor, p: torch.Tensor, count: int) -> torch.Tensor:
    """Thresholds of top-k, then top-p, from the ``count`` largest of each row; NaN where these do
    not suffice."""
    size = x.shape[1]
    top = x.topk(count, dim=-1).values
    by_k = torch.zeros_like(p)
    total = x.sum(dim=-1, dtype=torch.float64)
    if int(k.min()) < size:
        last = (k - 1).clamp(max=count - 1).unsqueeze(1)
        by_k = torch.where(k < size, top.gather(1, last).squeeze(1), by_k)
        total = torch.where(x < by_k.unsqueeze(1), 0, x).sum(dim=-1, dtype=torch.float64)
    sums = top.cumsum(dim=-1, dtype=torch.float64)
    reached = (sums < (p * total).unsqueeze(1)).sum(dim=-1)
    by_p = top.gather(1, reached.clamp(max=count - 1).unsqueeze(1)).squeeze(1)
    edge = torch.maximum(by_k, torch.where(p < 1, by_p, torch.zeros_like(by_p)))
    if count == size:
        return edge
    short = ((k > count) & (k < size)) | ((p < 1) & (reached >= count))
    return edge.masked_fill(short, torch.nan)


def token_logprobs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Natural log-prob of ``ids`` [S] under each row of ``logits`` [S, V]: [S] float32."""
    picked = logits.gather(1, ids.to(torch.int64).unsqueeze(1)).squeeze(1).float()
    return picked - logits.logsumexp(dim=-1).float()


def top_logprobs(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k most likely ids of each row [S, k] int32, and their log-probs [S, k] float32."""
    values, ids = logits.topk(min(k, logits.shape[1]), dim=-1)
    return ids.to(torch.int32), values.float() - logits.logsumexp(dim=-1, keepdim=True).float()
