"""The sampling operations: formulas, sets that filters keep, statistics of draws."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ramet.kernels.reference import ops
from ramet.kernels.reference.sampling import PROMPT_BIT, thresholds

OFF = {"top_k": -1, "top_p": 1.0, "min_p": 0.0}


def draw(
    logits: torch.Tensor,
    seeds: list[int],
    *,
    step: int = 0,
    temperature: float = 1.0,
    top_k: int = -1,
    top_p: float = 1.0,
    min_p: float = 0.0,
    filtered: bool = True,
) -> list[int]:
    """One draw of the one row of logits for each seed."""
    n = len(seeds)
    ids, bad = ops.sample(
        logits.expand(n, -1),
        torch.full((n,), temperature),
        torch.full((n,), top_k, dtype=torch.int32),
        torch.full((n,), top_p),
        torch.full((n,), min_p),
        torch.tensor(seeds),
        torch.full((n,), step, dtype=torch.int32),
        filtered=filtered,
    )
    assert not bad.any()
    assert ids.dtype == torch.int32
    return ids.tolist()


def mix(h: int) -> int:
    h ^= h >> 16
    h = h * 0x85EBCA6B & 0xFFFFFFFF
    h ^= h >> 13
    h = h * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ h >> 16


def uniform(seed: int, step: int) -> float:
    """The documented hash in unbounded integers."""
    h = mix((seed & 0xFFFFFFFF) + 0x9E3779B9 & 0xFFFFFFFF)
    h = mix(h ^ (seed >> 32 & 0xFFFFFFFF))
    h = mix(h + step * 0x9E3779B1 & 0xFFFFFFFF)
    return (mix(h ^ step) >> 8) * 2.0**-24


@settings(max_examples=300, deadline=None, derandomize=True)
@given(seed=st.integers(-(2**63), 2**63 - 1), step=st.integers(0, 2**31 - 1))
def test_hash_is_the_documented_one(seed: int, step: int) -> None:
    got = ops.uniform(torch.tensor([seed]), torch.tensor([step]))
    assert got.dtype == torch.float32
    assert got.item() == uniform(seed, step)
    assert 0.0 <= got.item() < 1.0


def test_hash_is_even_over_seeds_and_over_steps() -> None:
    n, bins = 1 << 16, 64
    many, one = torch.arange(n), torch.full((n,), 5)
    for seeds, steps in ((many, one), (one, many), (many << 32, one), (-many, many)):
        u = ops.uniform(seeds, steps)
        counts = torch.histc(u, bins, 0, 1).double()
        chi = ((counts - n / bins) ** 2 / (n / bins)).sum()
        assert chi < 120, "63 degrees of freedom: 1 in 100,000"
        follow = torch.corrcoef(torch.stack((u[:-1], u[1:])))[0, 1]
        assert abs(follow) < 0.02


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(1)) * 1.5
    n = 40_000
    ids = torch.tensor(draw(logits, list(range(n)), temperature=temperature))
    expected = (logits.double() / temperature).softmax(-1) * n
    counts = torch.bincount(ids, minlength=12)
    chi = ((counts - expected) ** 2 / expected).sum()
    assert chi < 42, "11 degrees of freedom: under 1 in 50,000"


def kept(logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    """What filters keep, token by token in float64, equal ones together."""
    p = logits.double().softmax(-1)
    alive = set(range(len(p)))
    if 0 < top_k < len(p):
        edge = sorted(p.tolist(), reverse=True)[top_k - 1]
        alive = {i for i in alive if p[i] >= edge}
    if top_p < 1:
        total = sum(p[i].item() for i in alive)
        for edge in sorted({p[i].item() for i in alive}, reverse=True):
            inside = {i for i in alive if p[i] >= edge}
            if sum(p[i].item() for i in inside) >= top_p * total:
                alive = inside
                break
    best = max(p[i].item() for i in alive)
    return {i for i in alive if p[i] >= min_p * best}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    values=st.lists(st.integers(-6, 6), min_size=2, max_size=30),
    top_k=st.sampled_from([-1, 1, 2, 5, 40]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.11, 1e-6]),
    min_p=st.sampled_from([0.0, 0.03, 0.5, 1.0]),
)
def test_filters_keep_the_right_sets(
    values: list[int], top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.tensor(values, dtype=torch.float32)
    weights = torch.exp(logits - logits.max()).unsqueeze(0)
    floor = thresholds(weights, torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))
    got = set(torch.nonzero(weights[0] >= floor).flatten().tolist())
    assert got == kept(logits, top_k, top_p, min_p)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(7, 1.0, 0.0), (-1, 0.6, 0.0), (-1, 1.0, 0.1), (9, 0.8, 0.05)]
)
def test_only_kept_tokens_are_drawn_and_all_of_them(top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(4)) * 2
    seen = set(draw(logits, list(range(20_000)), top_k=top_k, top_p=top_p, min_p=min_p))
    assert seen == kept(logits, top_k, top_p, min_p)


def test_filters_reach_beyond_the_first_candidates() -> None:
    """A flat distribution over a large vocabulary: the nucleus holds most of it."""
    flat = torch.randn(1, 20_000, generator=torch.Generator().manual_seed(2)) * 0.01
    weights = torch.exp(flat - flat.max())
    for top_k, top_p in ((-1, 0.9), (5000, 1.0), (5000, 0.5)):
        floor = thresholds(
            weights, torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([0.0])
        )
        ordered = weights[0].double().sort(descending=True).values
        ordered = ordered[:top_k] if top_k > 0 else ordered
        count = int((ordered.cumsum(0) < top_p * ordered.sum()).sum()) + 1
        count = min(count, len(ordered))
        assert abs(int((weights >= floor).sum()) - count) <= 2


def test_rows_with_different_filters_do_not_mix() -> None:
    logits = torch.randn(4, 60, generator=torch.Generator().manual_seed(9)) * 2
    settings_ = [(-1, 1.0, 0.0), (3, 1.0, 0.0), (-1, 0.5, 0.0), (-1, 1.0, 0.3)]
    k, p, m = (torch.tensor(column) for column in zip(*settings_))
    weights = torch.exp(logits - logits.max(-1, keepdim=True).values)
    floors = thresholds(weights, k, p, m)
    for row, values in enumerate(settings_):
        got = set(torch.nonzero(weights[row] >= floors[row]).flatten().tolist())
        assert got == kept(logits[row], *values)


def test_greedy_rows_beside_drawn_ones() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(3))
    ids, _ = ops.sample(
        logits,
        torch.tensor([0.0, 1.5, 0.0]),
        torch.tensor([-1, -1, 5]),
        torch.ones(3),
        torch.zeros(3),
        torch.tensor([1, 2, 3]),
        torch.zeros(3, dtype=torch.int32),
    )
    assert ids[0] == logits[0].argmax()
    assert ids[2] == logits[2].argmax()
    assert ids[1] == draw(logits[1], [2], temperature=1.5)[0]


def test_the_first_of_equal_logits_is_greedy() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [5.0, 5.0, 5.0, 5.0]])
    ids, bad = ops.greedy(logits)
    assert ids.tolist() == [1, 0]
    assert not bad.any()


def test_bad_rows_are_flagged_and_others_are_not() -> None:
    logits = torch.randn(4, 9)
    logits[1, 5] = torch.nan
    logits[2] = -torch.inf
    logits[3, :] = -torch.inf
    logits[3, 7] = torch.inf
    for ids, bad in (
        ops.greedy(logits),
        ops.sample(
            logits,
            torch.ones(4),
            torch.full((4,), 3),
            torch.full((4,), 0.9),
            torch.zeros(4),
            torch.arange(4),
            torch.zeros(4, dtype=torch.int32),
        ),
    ):
        assert bad.tolist() == [False, True, True, False]
        assert ids.tolist()[1:] == [0, 0, 7]


def test_a_draw_never_leaves_the_vocabulary_nor_hits_what_is_masked() -> None:
    logits = torch.full((1000,), -torch.inf)
    logits[[3, 500, 777]] = torch.tensor([0.0, 1.0, -30.0])
    seen = set(draw(logits, list(range(5000)), filtered=False))
    assert seen <= {3, 500, 777}
    assert {3, 500} <= seen


def test_penalties() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5, 3.0, -2.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    untouched = logits[1].clone()
    counts = torch.zeros((2, 5), dtype=torch.int32)
    counts[1] = torch.tensor([PROMPT_BIT, PROMPT_BIT + 2, 0, 1, 3])
    got = ops.penalize_(
        logits,
        torch.tensor([1, -1]),
        counts,
        torch.tensor([1.5, 9.0]),
        torch.tensor([0.25, 9.0]),
        torch.tensor([0.5, 9.0]),
    )
    want = torch.tensor(
        [
            2.0 / 1.5,
            -1.0 * 1.5 - 2 * 0.25 - 0.5,
            0.5,
            3.0 / 1.5 - 0.25 - 0.5,
            -2.0 * 1.5 - 3 * 0.25 - 0.5,
        ]
    )
    assert got is logits
    assert torch.allclose(logits[0], want)
    assert torch.equal(logits[1], untouched)


def test_bias_sums_and_saturates() -> None:
    logits = torch.tensor([[1.0, 2.0, 3e38], [0.0, 0.0, 0.0]])
    ops.add_at_(
        logits,
        torch.tensor([0, 0, 0, 1]),
        torch.tensor([0, 0, 2, 1]),
        torch.tensor([2.0, 3.0, 3e38, -math.inf]),
    )
    assert logits[0].tolist() == [6.0, 2.0, torch.finfo(torch.float32).max]
    assert logits[1].tolist() == [0.0, -math.inf, 0.0]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(size=st.integers(1, 100), seed=st.integers(0, 1000))
def test_masks(size: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    allowed = torch.rand(3, size, generator=g) < 0.5
    words = torch.zeros((3, -(-size // 32)), dtype=torch.int64)
    for row, token in torch.nonzero(allowed).tolist():
        words[row, token // 32] |= 1 << (token % 32)
    mask = (words - ((words >> 31) << 32)).to(torch.int32)
    logits = torch.randn(3, size, generator=g)
    want = logits.masked_fill(~allowed, -torch.inf)
    assert torch.equal(ops.mask_(logits, mask), want)


def test_logprobs() -> None:
    logits = torch.randn(3, 30) * 4
    exact = logits.double().log_softmax(-1)
    ids = torch.tensor([4, 0, 29], dtype=torch.int32)
    got = ops.token_logprobs(logits, ids)
    assert torch.allclose(got.double(), exact.gather(1, ids.long()[:, None]).squeeze(1), atol=1e-5)
    top_ids, top = ops.top_logprobs(logits, 5)
    values, want_ids = exact.topk(5)
    assert torch.equal(top_ids.long(), want_ids)
    assert torch.allclose(top.double(), values, atol=1e-5)
    assert ops.top_logprobs(logits, 99)[0].shape == (3, 30)
