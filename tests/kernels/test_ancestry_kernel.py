"""Extension by items that are trees, against the reference in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from ramet.kernels.attention.dispatch import attend
from ramet.kernels.attention.extend import extend
from ramet.kernels.attention.meta import Ancestry, AttentionMeta
from ramet.kernels.reference.attention import attention_exact


def random_tree(nodes, generator):
    """(ends, depths) of a tree in depth-first order: chains that now and then go back up."""
    depths = []
    for node in range(nodes):
        deepest = depths[-1] + 1 if node else 0
        back = int(torch.randint(0, 4, (1,), generator=generator)) == 0
        up = int(torch.randint(0, deepest + 1, (1,), generator=generator))
        depths.append(up if back else deepest)
    ends = []
    for node, depth in enumerate(depths):
        below = [i for i in range(node + 1, nodes) if depths[i] <= depth]
        ends.append(below[0] if below else nodes)
    return ends, depths


class Case:
    """Items (queries, tokens before the nodes, nodes), slots shuffled, unused ones full of NaN."""

    def __init__(self, items, heads, kv_heads, dim, dtype, device, seed=0):
        generator = torch.Generator().manual_seed(seed)
        kv_lens = [start + nodes for _, start, nodes in items]
        slots = sum(kv_lens) + 5
        caches = torch.full((2, slots, kv_heads, dim), torch.nan)
        table = torch.full((len(items), max(kv_lens) + 3), slots - 1, dtype=torch.int32)
        free = (torch.randperm(slots - 1, generator=generator) + 1).to(torch.int32)
        at = 0
        for row, length in enumerate(kv_lens):
            own = free[at : at + length]
            at += length
            table[row, :length] = own
            caches[:, own.long()] = torch.randn(2, length, kv_heads, dim, generator=generator)
        starts = torch.tensor([0, *(q for q, _, _ in items)]).cumsum(0).to(torch.int32)
        q = torch.randn(int(starts[-1]), heads, dim, generator=generator)
        self.q = q.to(dtype).to(device)
        self.k, self.v = caches.to(dtype).to(device)
        trees = [random_tree(nodes, generator) for _, _, nodes in items]
        offsets = torch.tensor([0, *(nodes for _, _, nodes in items)]).cumsum(0)[:-1]

        def column(values):
            return torch.tensor(values, dtype=torch.int32, device=device)

        self.meta = AttentionMeta(
            table=table.to(device),
            rows=column(list(range(len(items)))),
            q_start=starts.to(device),
            kv_lens=column(kv_lens),
            max_q=max(q for q, _, _ in items),
            max_kv=max(kv_lens),
            # An item without nodes says so by any start that it does not reach.
            ancestry=Ancestry(
                column([start if nodes else start + 7 * i for i, (_, start, nodes) in
                        enumerate(items)]),
                column(offsets.tolist()),
                column([end for ends, _ in trees for end in ends] or [0]),
                column([depth for _, depths in trees for depth in depths] or [0]),
            ),
        )  # fmt: skip

    def exact(self, window=0, softcap=0.0):
        """(out, lse) of the reference, on the CPU."""
        meta = self.meta
        assert meta.ancestry is not None
        a = meta.ancestry
        host = AttentionMeta(
            meta.table.cpu(), meta.rows.cpu(), meta.q_start.cpu(), meta.kv_lens.cpu(),
            meta.max_q, meta.max_kv,
            ancestry=Ancestry(a.starts.cpu(), a.offsets.cpu(), a.ends.cpu(), a.depths.cpu()),
        )  # fmt: skip
        scale = self.q.shape[2] ** -0.5
        return attention_exact(
            self.q.cpu(), self.k.cpu(), self.v.cpu(), host, scale, window, softcap
        )

    def check(self, close, poisoned, run=extend, window=0, softcap=0.0, **options):
        want, want_lse = self.exact(window, softcap)
        out = poisoned(*self.q.shape, dtype=self.q.dtype)
        lse = poisoned(*self.q.shape[:2])
        run(
            self.q, self.k, self.v, self.meta, self.q.shape[2] ** -0.5, window, softcap,
            out=out, lse=lse, **options,
        )  # fmt: skip
        close(out, want)
        tolerance = 1e-4 if self.q.dtype == torch.float32 else 2e-2
        assert (lse.double().cpu() - want_lse).abs().max() < tolerance


ITEMS = [(40, 150, 40), (1, 9, 0), (25, 33, 20), (7, 0, 30), (1, 70, 5), (30, 64, 0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("splits", [1, 3])
def test_trees_beside_others(dtype, window, splits, device, close, poisoned):
    case = Case(ITEMS, 4, 2, 64, dtype, device)
    case.check(close, poisoned, window=window, splits=splits)


@settings(max_examples=8, derandomize=True, deadline=None)
@given(
    items=st.lists(
        st.tuples(
            st.sampled_from([1, 2, 17, 40]), st.sampled_from([0, 1, 64, 100]), st.integers(0, 70)
        ),
        min_size=1,
        max_size=3,
    ),
    heads=st.sampled_from([(2, 2), (4, 1), (9, 3)]),
    window=st.sampled_from([0, 0, 5]),
    softcap=st.sampled_from([0.0, 3.0]),
)
def test_any_trees(items, heads, window, softcap, device, close, poisoned):
    items = [(min(q, start + nodes), start, nodes) for q, start, nodes in items if start + nodes]
    if items:
        case = Case(items, *heads, 64, torch.float32, device)
        case.check(close, poisoned, window=window, softcap=softcap)


def test_long_trees(device, on_gpu, close, poisoned):
    """Several tiles of queries and of keys."""
    case = Case([(200, 130, 180), (130, 0, 130)], 6, 2, 64, torch.bfloat16, device)
    case.check(close, poisoned, splits=1)
    if on_gpu:
        items = [(1 + 37 * i % 300, 50 * i, 1 + 37 * i % 300) for i in range(64)]
        Case(items, 8, 2, 128, torch.bfloat16, device).check(close, poisoned)


@pytest.mark.parametrize("invariant", [False, True])
def test_the_dispatcher_knows_trees(invariant, device, close, poisoned):
    """Decodes first, then a tree whose chunk is one query: it must not be taken for a decode."""
    case = Case([(1, 50, 0), (1, 9, 0), (1, 20, 6), (1, 20, 30)], 4, 2, 64, torch.float32, device)
    case.meta.num_decodes = 2
    case.check(close, poisoned, run=attend, invariant=invariant)


def test_a_whole_tree_is_not_a_whole_prompt(device, close):
    """What would be a long prompt with nothing cached, did it not branch."""
    case = Case([(1030, 0, 1030)], 1, 1, 64, torch.float32, device)
    case.meta.q_lens_host = case.meta.kv_lens_host = [1030]
    want, _ = case.exact()
    close(attend(case.q, case.k, case.v, case.meta, 0.125), want)
