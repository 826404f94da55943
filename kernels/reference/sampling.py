"""From logits to one token a row: penalties, biases, masks, filters, the draw, log-probs."""

from __future__ import annotations

import torch

from .hashing import uniform

PROMPT_BIT = 1 << 30
"""Set in a penalty count when the token is in the prompt."""

GREEDY_BELOW = 1e-5
_CANDIDATES = 1024


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [S] int32 of the largest logits; bad [S] bool where a row has a NaN or only -inf."""
    values, ids = logits.max(dim=-1)  # a NaN anywhere makes the maximum NaN
    bad = ~(values > -torch.inf)
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
    seen = counts.index_select(0, index.index_select(0, rows))
    output = seen & (PROMPT_BIT - 1)
    x = logits.index_select(0, rows)
    by = repetition.index_select(0, rows).unsqueeze(1)
    x = torch.where(seen != 0, torch.where(x > 0, x / by, x * by), x)
    x.sub_(output * frequency.index_select(0, rows).unsqueeze(1))
    x.sub_((output > 0) * presence.index_select(0, rows).unsqueeze(1))
    return logits.index_copy_(0, rows, x)


def add_at_(
    logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """``logits[rows[j], ids[j]] += values[j]``, saturating at float32's largest value."""
    logits.index_put_((rows, ids), values, accumulate=True)
    touched = logits[rows, ids].clamp_(max=torch.finfo(logits.dtype).max)
    return logits.index_put_((rows, ids), touched)


def mask_(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """-inf where the bit of ``mask`` [S, ceil(V / 32)] int32 is 0 (bit v % 32 of word v // 32)."""
    size = logits.shape[1]
    shifts = torch.arange(32, dtype=torch.int32, device=mask.device)
    bits = (mask.unsqueeze(-1) >> shifts) & 1
    allowed = bits.flatten(1)[:, :size] != 0
    return logits.masked_fill_(~allowed, -torch.inf)


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
    values, best = logits.max(dim=-1, keepdim=True)
    bad = ~(values > -torch.inf)
    hot = temperature.clamp(min=GREEDY_BELOW).unsqueeze(1)
    # The largest weight is exp(0): filters compare weights, so they need no normalizing sum.
    weights = torch.exp_((logits - values) / hot)
    weights.masked_fill_(torch.isnan(weights), 0)  # of bad rows, and of +inf - +inf
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
    x, k, p = weights.index_select(0, rows), k.index_select(0, rows), top_p.index_select(0, rows)
    count = min(size, _CANDIDATES)
    edge = _nucleus(x, k, p, count)
    while torch.isnan(edge).any():  # the candidates do not reach far enough: look at more of them
        count = min(size, count * 8)
        edge = _nucleus(x, k, p, count)
    floor[rows] = torch.maximum(floor[rows], edge)
    return floor


def _nucleus(x: torch.Tensor, k: torch.Tensor, p: torch.Tensor, count: int) -> torch.Tensor:
    """Thresholds of top-k, then top-p, from the ``count`` largest of each row; NaN where these do
    not suffice."""
    size = x.shape[1]
    top = x.topk(count, dim=-1).values
    last = (k - 1).clamp(max=count - 1).unsqueeze(1)
    by_k = torch.where(k < size, top.gather(1, last).squeeze(1), torch.zeros_like(p))
    total = torch.where(x < by_k.unsqueeze(1), 0, x).sum(dim=-1, dtype=torch.float64)
    sums = top.cumsum(dim=-1, dtype=torch.float64)
    need = (p * total).unsqueeze(1)
    reached = (sums < need).sum(dim=-1)
    by_p = top.gather(1, reached.clamp(max=count - 1).unsqueeze(1)).squeeze(1)
    by_p = torch.where(p < 1, by_p, torch.zeros_like(by_p))
    edge = torch.maximum(by_k, by_p)
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
