"""Sampling kernels against the torch reference: the same sets kept, the same tokens drawn."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from ramet.kernels import logits as changes
from ramet.kernels import rows, sampling
from ramet.kernels.reference import sampling as reference

PROMPT = reference.PROMPT_BIT
WIDE = 9000
"""More than one chunk."""


def random_logits(count, size, device, spread=4.0, seed=0):
    torch.manual_seed(seed)
    return (spread * torch.randn(count, size)).to(device)


@pytest.mark.parametrize("size", [5, 1000, WIDE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy(size, dtype, device):
    x = random_logits(7, size, device).to(dtype)
    x[1, size - 1] = 99.0
    x[2, 2], x[2, 4] = 50.0, 50.0
    x[3, 3] = torch.nan
    x[4] = -torch.inf
    x[5, 1] = torch.inf
    x[6], x[6, 3] = -torch.inf, -5.0
    ids, bad = rows.greedy(x)
    want, want_bad = reference.greedy(x.cpu())
    assert ids.tolist() == want.tolist()
    assert bad.tolist() == want_bad.tolist()
    assert ids.tolist()[1:] == [size - 1, 2, 0, 0, 1, 3]


@pytest.mark.parametrize("size", [5, WIDE])
def test_logprobs(size, device):
    x = random_logits(4, size, device)
    x[1, 2], x[2] = -torch.inf, x[2] + 1000
    x[3, 0] = torch.nan
    ids = torch.tensor([0, 2, size - 1, 1], dtype=torch.int32, device=device)
    exact = x.double().cpu().log_softmax(-1)
    got = rows.token_logprobs(x, ids).cpu()
    assert (got[0] - exact[0, 0]).abs() < 1e-5
    assert got[1] == -torch.inf
    assert (got[2] - exact[2, size - 1]).abs() < 2e-4
    assert got[3].isnan()
    assert (rows.log_sum_exp(x)[:3].cpu() - x.double().cpu().logsumexp(-1)[:3]).abs().max() < 2e-4
    top, values = rows.top_logprobs(x[:2], 3)
    want_top, want_values = reference.top_logprobs(x[:2].cpu(), 3)
    assert torch.equal(top.cpu(), want_top)
    assert (values.cpu() - want_values).abs().max() < 1e-5


def test_penalties(device):
    x = random_logits(3, 2500, device)
    counts = torch.randint(-3, 4, (2, 2500), dtype=torch.int32).clamp(min=0)
    counts += PROMPT * (torch.rand(2, 2500) < 0.2)
    counts = counts.to(torch.int32)
    index = torch.tensor([1, -1, 0])
    values = torch.tensor([[1.3, 1.0, 0.7], [0.5, 9.0, -0.25], [0.1, 9.0, 0.4]])
    want = reference.penalize_(x.cpu().clone(), index, counts, *values)
    got = x.clone()
    changes.penalize_(
        got, index.to(device), counts.to(device), *values.to(device), prompt_bit=PROMPT
    )  # fmt: skip
    assert torch.equal(got[1], x[1]), "a row without penalties is left alone"
    assert (got.cpu() - want).abs().max() < 1e-5


@pytest.mark.parametrize("size", [31, 32, 33, 3000])
def test_mask(size, device):
    x = random_logits(3, size, device)
    words = torch.randint(-(2**31), 2**31, (3, -(-size // 32)), dtype=torch.int64).to(torch.int32)
    want = reference.mask_(x.cpu().clone(), words)
    assert torch.equal(changes.mask_(x, words.to(device)).cpu(), want)


@pytest.mark.parametrize("at", [[2], [0, 3], [3, 1, 0, 2]])
def test_a_mask_of_some_rows(at, device):
    x = random_logits(4, 70, device)
    words = torch.randint(-(2**31), 2**31, (len(at), 3), dtype=torch.int64).to(torch.int32)
    index = torch.tensor(at, dtype=torch.int32)
    want = x.cpu().clone()
    for row, mask in zip(at, words):
        want[row : row + 1] = reference.mask_(want[row : row + 1].clone(), mask[None])
    assert torch.equal(reference.mask_(x.cpu().clone(), words, index), want)
    assert torch.equal(changes.mask_(x, words.to(device), index.to(device)).cpu(), want)


@pytest.mark.parametrize("of", [[0], [1, 1], [1, 0, 1], [0, 0, 0, 1]])
def test_rows_alike_share_a_mask(of, device):
    x = random_logits(4, 70, device)
    words = torch.randint(-(2**31), 2**31, (2, 3), dtype=torch.int64).to(torch.int32)
    at, index = torch.arange(3, 3 - len(of), -1, dtype=torch.int32), torch.tensor(of).int()
    want = reference.mask_(x.cpu().clone(), words[of], at)
    assert torch.equal(reference.mask_(x.cpu().clone(), words, at, index), want)
    got = changes.mask_(x, words.to(device), at.to(device), index.to(device))
    assert torch.equal(got.cpu(), want)


def test_bad_arguments_are_named(device):
    x = random_logits(2, 40, device)
    with pytest.raises(ValueError, match=r"of must be \[2\] int32"):
        lines = torch.zeros(1, 2, dtype=torch.int32, device=device)
        changes.mask_(x, lines, of=torch.zeros(1, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match=r"mask must be \[2, 2\]"):
        changes.mask_(x, torch.zeros(2, 3, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match="float32"):
        changes.mask_(x.half(), torch.zeros(2, 2, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match="counts must be"):
        changes.penalize_(
            x, x, torch.zeros(1, 39, dtype=torch.int32), x, x, x, prompt_bit=PROMPT
        )  # fmt: skip


class Asked:
    """What each row asks for, as tensors."""

    def __init__(self, filters, device, temperature=1.0, seed=0):
        """filters: (top_k, top_p, min_p) a row."""
        count = len(filters)
        k, p, least = zip(*filters)
        self.temperature = torch.full((count,), temperature, device=device)
        self.top_k = torch.tensor(k, dtype=torch.int32, device=device)
        self.top_p = torch.tensor(p, dtype=torch.float32, device=device)
        self.min_p = torch.tensor(least, dtype=torch.float32, device=device)
        torch.manual_seed(seed)
        self.seeds = torch.randint(-(2**62), 2**62, (count,), device=device)
        self.steps = torch.randint(0, 1000, (count,), device=device)

    def arguments(self):
        return (self.temperature, self.top_k, self.top_p, self.min_p, self.seeds, self.steps)

    def check(self, logits, filtered=True):
        """Draw, and compare with the reference."""
        ids, bad = sampling.sample(logits, *self.arguments(), filtered=filtered)
        want, want_bad = reference.sample(
            logits.cpu(), *(x.cpu() for x in self.arguments()), filtered=filtered
        )
        assert bad.tolist() == want_bad.tolist()
        for row in (ids.cpu() != want).nonzero().flatten().tolist():
            # Sums round differently: near the border of two tokens either is right.
            assert self.right(logits[row].double().cpu(), row, int(ids[row])), (
                f"row {row} drew {int(ids[row])}, the reference {int(want[row])}"
            )
        return ids

    def right(self, x, row, token):
        """Whether a token's share of the exact running sum holds the random number, within 1e-5."""
        weight = ((x - x.max()) / float(self.temperature[row])).exp().float()
        one = slice(row, row + 1)
        filters = (t[one].cpu() for t in (self.top_k, self.top_p, self.min_p))
        floor = reference.thresholds(weight[None], *filters)
        kept = torch.where(weight >= floor, weight, 0).double()
        share = float(reference.uniform(self.seeds[one].cpu(), self.steps[one].cpu()))
        high = float(kept[: token + 1].sum() / kept.sum())
        low = high - float(kept[token] / kept.sum())
        return kept[token] > 0 and low - 1e-5 <= share <= high + 1e-5


def test_random_numbers_are_the_reference_s(device):
    """Two tokens of equal weight: the draw is the first bit of the number."""
    asked = Asked([(0, 1.0, 0.0)] * 32, device)
    x = torch.zeros(32, 2, device=device)
    ids, _ = sampling.sample(x, *asked.arguments(), filtered=False)
    share = reference.uniform(asked.seeds.cpu(), asked.steps.cpu())
    assert ids.tolist() == (share >= 0.5).int().tolist()
    assert 4 < sum(ids.tolist()) < 28


@pytest.mark.parametrize("size", [3, 700, WIDE])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_unfiltered_draws(size, temperature, device):
    asked = Asked([(0, 1.0, 0.0)] * 8, device, temperature)
    asked.check(random_logits(8, size, device), filtered=False)


FILTERS = [
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (5, 1.0, 0.0),
    (40, 0.5, 0.0),
    (0, 0.9, 0.0),
    (0, 1.0, 0.1),
    (60, 0.95, 0.02),
    (10_000_000, 0.3, 0.5),
]


@pytest.mark.parametrize("size", [3, 700, WIDE])
@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_filtered_draws(size, temperature, device):
    for seed in range(3):
        asked = Asked(FILTERS, device, temperature, seed)
        asked.check(random_logits(len(FILTERS), size, device, seed=seed))


def test_rows_too_flat_to_pack_are_searched_whole(device):
    """Nearly equal logits: the threshold lies below more candidates than are packed."""
    filters = [(6000, 1.0, 0.0), (0, 0.9, 0.0), (7000, 0.8, 0.1)]
    Asked(filters, device).check(random_logits(3, WIDE, device, spread=0.2))


def test_equal_weights_stay_together(device):
    x = torch.zeros(40, 6, device=device)
    x[:, 3:] = -9.0
    ids = Asked([(1, 1.0, 0.0)] * 20 + [(0, 0.01, 0.0)] * 20, device).check(x)
    assert set(ids.tolist()) == {0, 1, 2}


def test_greedy_and_bad_rows_among_draws(device):
    asked = Asked([(0, 0.9, 0.0)] * 6, device)
    asked.temperature[0] = 0.0
    x = random_logits(6, 700, device)
    x[1, 5] = torch.nan
    x[2] = -torch.inf
    x[3], x[3, 17] = -torch.inf, 2.0
    x[4, 9] = torch.inf
    ids = asked.check(x)
    assert ids.tolist()[:5] == [int(x[0].argmax()), 0, 0, 17, 9]


@settings(max_examples=4, derandomize=True, deadline=None)
@given(row=st.sampled_from(range(len(FILTERS))), seed=st.integers(0, 3))
def test_a_draw_does_not_depend_on_its_neighbours(row, seed, device):
    x = random_logits(len(FILTERS), 2000, device, seed=seed)
    asked = Asked(FILTERS, device, 0.9, seed)
    ids, _ = sampling.sample(x, *asked.arguments())
    alone = [t[row : row + 1] for t in asked.arguments()]
    assert int(sampling.sample(x[row : row + 1], *alone)[0]) == int(ids[row])


def test_draws_follow_the_distribution(device):
    asked = Asked([(0, 1.0, 0.0)] * 150, device)
    weights = torch.tensor([0.5, 0.25, 0.15, 0.1], device=device)
    ids, _ = sampling.sample(weights.log().repeat(150, 1), *asked.arguments(), filtered=False)
    counts = torch.bincount(ids.cpu(), minlength=4)
    chi_square = ((counts - 150 * weights.cpu()) ** 2 / (150 * weights.cpu())).sum()
    assert chi_square < 16.3, "one in a thousand would be beyond that"
