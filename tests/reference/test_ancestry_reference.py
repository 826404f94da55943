"""Items that are trees: each node attends as the sequence would that ends with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ramet.kernels.attention.meta import Ancestry, AttentionMeta
from ramet.kernels.reference.attention import attention, attention_exact, attention_lse

PARENTS = [
    [-1, 0, 1, 1, 3, 0, 5, -1, 7, 7, -1],
    [-1, 0, 1, 2, 3, 4],
    [-1, -1, -1],
    [-1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    [-1],
]


def ancestry(trees: list[tuple[int, list[int]]]) -> Ancestry:
    """Of items (tokens before the nodes, parent of each node in depth-first order)."""
    starts, offsets, all_ends, all_depths = [], [], [], []
    for start, parents in trees:
        depths = []
        for parent in parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        ends = []
        for node, depth in enumerate(depths):
            below = [i for i in range(node + 1, len(depths)) if depths[i] <= depth]
            ends.append(below[0] if below else len(depths))
        starts.append(start)
        offsets.append(len(all_ends))
        all_ends += ends
        all_depths += depths
    columns = (starts, offsets, all_ends, all_depths)
    return Ancestry(*(torch.tensor(column, dtype=torch.int32) for column in columns))


def by_paths(case: Any, trees: list[tuple[int, list[int]]], q_lens: list[int], *more: Any) -> Any:
    """The formula over each query's own sequence, one item and one query each."""
    meta = case.meta
    outs, logs = [], []
    for item, (start, parents) in enumerate(trees):
        line = meta.table[meta.rows[item]]
        total = start + len(parents)
        for column in range(total - q_lens[item], total):
            path = list(range(min(column + 1, start)))
            node, tail = column - start, []
            while node >= 0:
                tail.append(start + node)
                node = parents[node]
            path += tail[::-1]
            at = len(outs)
            alone = AttentionMeta(
                table=line[path][None],
                rows=torch.zeros(1, dtype=torch.int32),
                q_start=torch.tensor([0, 1]),
                kv_lens=torch.tensor([len(path)]),
                max_q=1,
                max_kv=len(path),
            )
            out, lse = attention_exact(case.q[at : at + 1], case.k, case.v, alone, 0.25, *more)
            outs.append(out)
            logs.append(lse)
    return torch.cat(outs), torch.cat(logs)


def make(paged: Any, trees: list[tuple[int, list[int]]], q_lens: list[int], **options: Any) -> Any:
    case = paged(q_lens, [start + len(p) for start, p in trees], decodes=0, **options)
    case.meta.ancestry = ancestry(trees)
    return case


def check(case: Any, want: Any, lse: Any, *more: Any) -> None:
    tolerance = 2e-6 if case.q.dtype == torch.float32 else 2e-2
    args = (case.q, case.k, case.v, case.meta, 0.25, *more)
    for got, logs in (attention_exact(*args), attention_lse(*args)):
        assert (got.double() - want).norm() < tolerance * want.norm()
        assert (logs.double() - lse).abs().max() < 1e3 * tolerance
    assert (attention(*args).double() - want).norm() < tolerance * want.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 3, 9])
@pytest.mark.parametrize("before", [0, 1, 3])
def test_nodes_see_their_ancestors(paged: Any, dtype: Any, window: int, before: int) -> None:
    """``before``: how many tokens ahead of the nodes are computed in the same step."""
    trees = [(20 + 5 * i, parents) for i, parents in enumerate(PARENTS)]
    q_lens = [len(parents) + before for parents in PARENTS]
    case = make(paged, trees, q_lens, dtype=dtype)
    want, lse = by_paths(case, trees, q_lens, window)
    check(case, want, lse, window)


@pytest.mark.parametrize("window", [0, 4])
def test_a_tree_may_be_computed_in_chunks_and_have_nothing_before_it(
    paged: Any, window: int
) -> None:
    trees = [(0, PARENTS[0]), (9, PARENTS[0]), (0, PARENTS[1])]
    for chunk in (1, 3, 8):
        q_lens = [min(chunk, len(parents)) for _, parents in trees]
        case = make(paged, trees, q_lens)
        check(case, *by_paths(case, trees, q_lens, window), window)


def test_beside_items_that_are_none(paged: Any) -> None:
    case = paged([1, 1, 4, 14], [30, 12, 20, 31], decodes=2)
    parents = PARENTS[0]
    plain, _ = attention_exact(case.q, case.k, case.v, case.meta, 0.25)
    trees = [(30, []), (99, []), (20, []), (20, parents)]
    case.meta.ancestry = ancestry(trees)
    want, lse = by_paths(case, [*trees[:1], (12, []), *trees[2:]], [1, 1, 4, 14])
    assert torch.allclose(want[:6], plain[:6])
    check(case, want, lse)


def test_many_nodes_go_block_by_block(paged: Any) -> None:
    parents = [i * 7919 % (i + 1) - 1 if i % 5 == 0 else i - 1 for i in range(300)]
    trees = [(150, preorder(parents))]
    for window in (0, 40):
        case = make(paged, trees, [310])
        check(case, *by_paths(case, trees, [310], window), window)


@settings(max_examples=30, deadline=None)
@given(
    choices=st.lists(st.integers(0, 10**6), min_size=1, max_size=30),
    start=st.integers(0, 20),
    before=st.integers(0, 20),
    window=st.sampled_from([0, 1, 5]),
    seed=st.integers(0, 99),
)
def test_any_tree(
    paged: Any, choices: list[int], start: int, before: int, window: int, seed: int
) -> None:
    parents = preorder([number % (i + 1) - 1 for i, number in enumerate(choices)])
    trees = [(start, parents)]
    q_lens = [len(parents) + min(before, start)]
    case = make(paged, trees, q_lens, seed=seed)
    check(case, *by_paths(case, trees, q_lens, window), window)


def preorder(parents: list[int]) -> list[int]:
    """The same tree, its nodes numbered depth first."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    order: list[int] = []
    number = {-1: -1}
    stack = children.get(-1, [])[::-1]
    while stack:
        node = stack.pop()
        number[node] = len(order)
        order.append(node)
        stack += children.get(node, [])[::-1]
    return [number[parents[node]] for node in order]
