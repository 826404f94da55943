"""The CPU's attention against the formula in float64, query by query."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ramet.kernels.reference import attention_plan
from ramet.kernels.reference.attention import attention, attention_exact, attention_lse
from ramet.kernels.reference.attention_plan import Keys, plan_for

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.isfinite(got).all()
    error = (got.double() - want).norm() / want.norm().clamp_min(1e-9)
    assert error < TOLERANCE[got.dtype], float(error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 1, 7])
@pytest.mark.parametrize("decodes", [0, 1, 4])
@pytest.mark.parametrize("layout", ["runs", "scattered", "shared"])
def test_equals_the_formula(
    paged: Any, dtype: torch.dtype, window: int, decodes: int, layout: str
) -> None:
    case = paged(
        [1, 1, 1, 1, 5, 17, 1],
        [30, 70, 66, 67, 29, 17, 8],
        decodes=decodes,
        dtype=dtype,
        runs=layout == "runs",
        shared=8 if layout == "shared" else 0,
    )
    args = (case.q, case.k, case.v, case.meta, 0.25, window)
    want, lse = attention_exact(*args)
    close(attention(*args), want)
    got, got_lse = attention_lse(*args)
    close(got, want)
    assert (got_lse.double() - lse).abs().max() < 1e-3
    assert got_lse.dtype == torch.float32


@pytest.mark.parametrize("decodes", [0, 3])
def test_softcap_and_sinks(paged: Any, decodes: int) -> None:
    case = paged([1, 1, 1, 9], [12, 40, 1, 30], decodes=decodes)
    sinks = torch.randn(case.q.shape[1])
    args = (case.q, case.k, case.v, case.meta, 0.5, 6, 3.0, sinks)
    want, lse = attention_exact(*args)
    close(attention(*args), want)
    got, got_lse = attention_lse(*args)
    close(got, want)
    assert (got_lse.double() - lse).abs().max() < 1e-5
    assert (attention_exact(*args[:-1])[0] - want).abs().max() > 1e-3, "sinks must matter here"


def test_items_without_keys_are_harmless(paged: Any) -> None:
    """Padding of a batch: an item with no KV gets zeros and disturbs nobody."""
    case = paged([1, 1, 1, 2], [9, 0, 5, 2], decodes=3)
    got = attention(case.q, case.k, case.v, case.meta, 0.25)
    close(got, attention_exact(case.q, case.k, case.v, case.meta, 0.25)[0])
    assert (got[1] == 0).all()


def test_what_is_not_attended_to_has_no_influence(paged: Any) -> None:
    """NaN in every slot that no item reads, slot by slot of the tables, changes nothing."""
    case = paged([1, 1, 6], [20, 33, 14], decodes=2)
    before = attention(case.q, case.k, case.v, case.meta, 0.25)
    used = {0}
    for item, row in enumerate(case.meta.rows.tolist()):
        used |= set(case.meta.table[row, : int(case.meta.kv_lens[item])].tolist())
    unused = [s for s in range(case.k.shape[0]) if s not in used]
    case.k[unused] = torch.nan
    case.v[unused] = torch.nan
    case.meta.plans.clear()
    assert torch.equal(before, attention(case.q, case.k, case.v, case.meta, 0.25))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    items=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 40)), min_size=1, max_size=5),
    decodes=st.lists(st.integers(1, 60), max_size=5),
    heads=st.sampled_from([(1, 1), (1, 4), (3, 3), (2, 1)]),
    window=st.sampled_from([0, 1, 5, 64]),
    seed=st.integers(0, 99),
)
def test_any_ragged_batch(
    paged: Any,
    items: list[tuple[int, int]],
    decodes: list[int],
    heads: tuple[int, int],
    window: int,
    seed: int,
) -> None:
    q_lens = [1] * len(decodes) + [q for q, _ in items]
    kv_lens = decodes + [q + cached for q, cached in items]
    case = paged(
        q_lens, kv_lens, decodes=len(decodes), kv_heads=heads[0], group=heads[1], seed=seed
    )
    want, _ = attention_exact(case.q, case.k, case.v, case.meta, 0.3, window)
    close(attention(case.q, case.k, case.v, case.meta, 0.3, window), want)


def slots_of(keys: Keys) -> list[list[int]]:
    """Which slots each item of a product reads, without padding."""
    index = keys.index if keys.index is not None else torch.arange(keys.length) + keys.start
    rows = index.view(keys.items, keys.length)
    if keys.mask is None:
        return rows.tolist()
    real = keys.mask.view(keys.items, keys.length) == 0
    return [row[seen].tolist() for row, seen in zip(rows, real)]


def items_of(keys: Keys, count: int) -> list[int]:
    return torch.arange(count)[keys.at].tolist()


def grow(case: Any, parents: list[tuple[int, int]]) -> None:
    """Make item i begin in the slots of an earlier item, up to a position: a forest of prefixes."""
    meta = case.meta
    for item, (parent, until) in enumerate(parents):
        if parent < item:
            until = min(until, int(meta.kv_lens[parent]), int(meta.kv_lens[item]) - 1)
            meta.table[meta.rows[item], :until] = meta.table[meta.rows[parent], :until]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    parents=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 60)), min_size=8, max_size=8),
    pays=st.sampled_from([1, 20, 100, 10_000]),
    seed=st.integers(0, 99),
)
def test_shared_prefixes_are_read_once_and_change_nothing(
    paged: Any,
    lengths: list[int],
    parents: list[tuple[int, int]],
    pays: int,
    seed: int,
) -> None:
    n = len(lengths)
    case = paged([1] * n, lengths, decodes=n, seed=seed)
    grow(case, parents[:n])
    before = attention_plan.SHARING_PAYS
    attention_plan.SHARING_PAYS = pays
    try:
        plan = plan_for(case.meta, 0)
    finally:
        attention_plan.SHARING_PAYS = before
    read: list[list[int]] = [[] for _ in lengths]
    for keys in plan.shared:
        (slots,) = slots_of(keys)
        sharers = items_of(keys, n)
        assert (len(sharers) - 1) * len(slots) >= pays
        for item in sharers:
            read[item] += slots
    for keys in plan.own:
        for item, slots in zip(items_of(keys, n), slots_of(keys), strict=True):
            assert slots, "every item has a key of its own"
            read[item] += slots
    for item, row in enumerate(case.meta.rows.tolist()):
        assert read[item] == case.meta.table[row, : lengths[item]].tolist()
    args = (case.q, case.k, case.v, case.meta, 0.3)
    want, lse = attention_exact(*args)
    close(attention(*args), want)
    got, got_lse = attention_lse(*args)
    close(got, want)
    assert (got_lse.double() - lse).abs().max() < 1e-4


def test_a_tree_of_prefixes_is_shared_level_by_level(paged: Any) -> None:
    """Eight items under one root of 200, two groups of 100 more, the rest their own."""
    case = paged([1] * 8, [330 + i for i in range(8)], decodes=8)
    grow(case, [(0, 0)] + [(0, 300 if i < 4 else 200) for i in range(1, 8)])
    grow(case, [(9, 0)] * 5 + [(4, 300)] * 3)
    plan = plan_for(case.meta, 0)
    assert [keys.length for keys in plan.shared] == [200]
    attention_plan.SHARING_PAYS, before = 300, attention_plan.SHARING_PAYS
    case.meta.plans.clear()
    plan = plan_for(case.meta, 0)
    attention_plan.SHARING_PAYS = before
    assert [keys.length for keys in plan.shared] == [200, 100, 100]
    assert [items_of(keys, 8) for keys in plan.shared[1:]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    close(
        attention(case.q, case.k, case.v, case.meta, 0.25),
        attention_exact(case.q, case.k, case.v, case.meta, 0.25)[0],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 150, 400])
def test_long_extends_go_block_by_block(paged: Any, dtype: torch.dtype, window: int) -> None:
    case = paged([1, 300, 140], [9, 420, 140], decodes=1, dtype=dtype)
    want, lse = attention_exact(case.q, case.k, case.v, case.meta, 0.25, window)
    got, got_lse = attention_lse(case.q, case.k, case.v, case.meta, 0.25, window)
    close(got, want)
    close(attention(case.q, case.k, case.v, case.meta, 0.25, window), want)
    assert (got_lse.double() - lse).abs().max() < 1e-4
