"""Tree attention against the formula in float64, over random trees."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from ramet.kernels.attention.decode import decode
from ramet.kernels.attention.meta import AttentionMeta
from ramet.kernels.attention.tree import cost, shape_for, tree_decode, work_for
from ramet.kernels.attention.tree_kernels import merge_lists_kernel
from ramet.kernels.attention.worklist import make_list
from ramet.kernels.launch import start
from ramet.kernels.reference.attention import attention_exact
from ramet.kernels.reference.tree import tree_attention


class Tree:
    """Items at the leaves of a random tree, each node's slots shared by all items below it; slots
    shuffled, unused ones full of NaN."""

    def __init__(self, items, depth, longest, seed, *, grown=0):
        random = np.random.default_rng(seed)
        nodes: list[tuple[int, list[int], int]] = []
        """(first position, items, length)"""
        tails = np.zeros(items, np.int64)
        work = [(list(range(items)), 0, depth)]
        while work:
            some, at, levels = work.pop()
            length = int(random.integers(1, longest + 1))
            if len(some) > 1 and levels > 1:
                nodes.append((at, some, length))
                tails[some] = at + length
                cuts = np.sort(random.integers(1, len(some), int(random.integers(0, 4))))
                work += [
                    (part, at + length, levels - 1)
                    for part in (list(p) for p in np.split(np.array(some), np.unique(cuts)))
                    if len(part) > 1
                ]
        self.kv_lens = (tails + random.integers(1, longest + 1, items)).astype(np.int32)
        self.planned_lens = np.maximum(self.kv_lens - grown, tails + 1).astype(np.int32)
        total = sum(length for _, _, length in nodes) + int((self.kv_lens - tails).sum())
        free = (random.permutation(total) + 1).astype(np.int32)
        self.rows = random.permutation(items + 3)[:items].astype(np.int32)
        self.table = np.full((items + 3, int(self.kv_lens.max()) + 2), total + 1, np.int32)
        taken = 0
        for at, some, length in nodes:
            self.table[self.rows[some], at : at + length] = free[taken : taken + length]
            taken += length
        for row, tail, length in zip(self.rows, tails, self.kv_lens):
            self.table[row, tail:length] = free[taken : taken + length - tail]
            taken += length - tail
        self.num_slots = total + 2
        self.starts = np.array([at for at, _, _ in nodes], np.int32)
        self.ends = np.array([at + length for at, _, length in nodes], np.int32)
        self.reader_starts = np.cumsum([0, *(len(s) for _, s, _ in nodes)]).astype(np.int32)
        self.readers = np.array([i for _, some, _ in nodes for i in some], np.int32)
        self.tails = tails.astype(np.int32)

    def list(self, shape):
        made = make_list(
            self.rows, self.planned_lens, self.starts, self.ends, self.reader_starts,
            self.readers, self.tails, shape,
        )  # fmt: skip
        assert made is not None
        return made


class Case:
    """A tree with queries, keys and values."""

    def __init__(self, tree, heads, kv_heads, dim, dtype, device, *, kv_dtype=None, items=None):
        torch.manual_seed(1)
        self.tree, self.device = tree, device
        caches = torch.randn(2, tree.num_slots, kv_heads, dim)
        # Slot 0 is the scratch slot, whose values are finite; the last one is nobody's.
        caches[:, -1] = torch.nan
        self.k, self.v = caches.to(kv_dtype or dtype).to(device)
        self.q = torch.randn(items or len(tree.rows), heads, dim).to(dtype).to(device)
        self.sinks = torch.randn(heads).to(device)
        count = len(tree.rows)
        self.meta = AttentionMeta(
            table=torch.from_numpy(tree.table).to(device),
            rows=torch.from_numpy(tree.rows).to(device),
            q_start=torch.arange(count + 1, dtype=torch.int32, device=device),
            kv_lens=torch.from_numpy(tree.kv_lens).to(device),
            max_q=1,
            max_kv=int(tree.kv_lens.max()),
            num_decodes=count,
        )
        self.shape = shape_for(heads, kv_heads, dim, dtype, max(len(self.q), count), device)
        self.work = work_for(self.shape, dim, device)

    def poison(self):
        self.work.partial.fill_(torch.nan)
        self.work.logs.fill_(torch.nan)

    def run(self, poisoned, *, with_sinks=False, **options):
        self.poison()
        self.work.fill(self.tree.list(self.shape))
        out = poisoned(*self.q.shape, dtype=self.q.dtype)
        lse = poisoned(*self.q.shape[:2])
        kv_lens = self.meta.kv_lens
        tree_decode(
            self.q, self.k, self.v, self.meta.table, kv_lens, self.work, self.q.shape[2] ** -0.5,
            sinks=self.sinks if with_sinks else None, out=out, lse=lse, **options,
        )  # fmt: skip
        return out, lse

    def check(self, poisoned, close, **options):
        out, lse = self.run(poisoned, **options)
        known = ("softcap", "k_scale", "v_scale")
        formula = {key: value for key, value in options.items() if key in known}
        k_scale, v_scale = formula.pop("k_scale", 1.0), formula.pop("v_scale", 1.0)
        count = len(self.tree.rows)
        want, want_lse = attention_exact(
            self.q[:count].cpu(), self.k.cpu().double() * k_scale, self.v.cpu().double() * v_scale,
            _on_cpu(self.meta), self.q.shape[2] ** -0.5,
            sinks=self.sinks.cpu() if options.get("with_sinks") else None, **formula,
        )  # fmt: skip
        # Weights and results rounded to bfloat16 alone make 2.3e-3.
        close(out[:count], want, 3e-3 if self.q.dtype == torch.bfloat16 else None)
        exact = self.q.dtype == torch.float32
        assert (lse[:count].cpu() - want_lse).abs().max() < (1e-4 if exact else 2e-2)
        assert not out[count:].any()
        return out


def _on_cpu(meta):
    return AttentionMeta(
        meta.table.cpu(), meta.rows.cpu(), meta.q_start.cpu(), meta.kv_lens.cpu(), 1, meta.max_kv,
        meta.num_decodes,
    )  # fmt: skip


trees = st.builds(
    Tree,
    items=st.integers(1, 12),
    depth=st.integers(1, 6),
    longest=st.sampled_from([5, 40, 100]),
    seed=st.integers(0, 1000),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=6, derandomize=True, deadline=None)
@given(tree=trees, heads=st.sampled_from([(4, 2), (6, 1), (7, 1), (2, 2)]))
def test_equals_plain_decode(tree, heads, dtype, device, close, poisoned):
    case = Case(tree, *heads, 64, dtype, device)
    out = case.check(poisoned, close)
    plain = decode(case.q, case.k, case.v, case.meta, 64**-0.5)
    if dtype == torch.float32:
        assert (out - plain).norm() <= 1e-5 * plain.norm()
    else:  # beyond what rounding either may be off by
        torch.testing.assert_close(out, plain, atol=2e-3, rtol=2**-7)


@pytest.mark.parametrize("dim", [80, 96, 128, 256])
def test_other_head_sizes(dim, device, close, poisoned):
    Case(Tree(5, 3, 60, 3), 4, 2, dim, torch.float16, device).check(poisoned, close)


@pytest.mark.parametrize(
    "options",
    [{"softcap": 3.0}, {"with_sinks": True}, {"softcap": 5.0, "with_sinks": True}],
)
def test_options(options, device, close, poisoned):
    case = Case(Tree(6, 3, 50, 5), 4, 2, 64, torch.float32, device)
    case.check(poisoned, close, **options)


def test_many_heads_of_one_kv_head(device, close, poisoned):
    Case(Tree(4, 2, 50, 2), 40, 2, 64, torch.float16, device).check(poisoned, close)
    with pytest.raises(ValueError, match="65 heads"):
        shape_for(65, 1, 64, torch.float16, 1, device)


def test_float8_cache(device, close, poisoned):
    case = Case(Tree(5, 3, 60, 9), 4, 2, 64, torch.bfloat16, device, kv_dtype=torch.float8_e4m3fn)
    case.check(poisoned, close, k_scale=0.5, v_scale=2.0)


@pytest.mark.parametrize("grown", [30, 150])
def test_tails_grow_after_the_list_was_made(grown, device, close, poisoned):
    Case(Tree(5, 3, 160, 11, grown=grown), 4, 2, 64, torch.float32, device).check(poisoned, close)


def test_items_that_pad_the_step_give_zeros(device, close, poisoned):
    tree = Tree(3, 2, 40, 4)
    case = Case(tree, 4, 2, 64, torch.bfloat16, device, items=5)
    pad = torch.ones(2, dtype=torch.int32, device=device)
    case.meta.kv_lens = torch.cat([case.meta.kv_lens, pad])
    out, lse = case.run(poisoned)
    assert not out[3:].any()
    assert torch.isinf(lse[3:]).all()
    assert torch.isfinite(out).all()


def test_long_segments_in_many_pieces(device, close, poisoned):
    tree = Tree(4, 2, 1500, 21)
    case = Case(tree, 4, 2, 64, torch.float32, device)
    assert case.tree.list(case.shape).shared[:, 6].max() > 1
    case.check(poisoned, close)


def test_merge_of_many_parts(device, close, poisoned):
    """More than one look takes, some without keys; the largest come last."""
    torch.manual_seed(2)
    counts = [70, 0, 1, 33]
    offsets = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    partial = torch.randn(sum(counts), 2, 64)
    logs = torch.linspace(-30, 30, sum(counts))[:, None] + torch.randn(sum(counts), 2)
    logs[5:40] = -torch.inf
    out, lse = poisoned(4, 2, 64), poisoned(4, 2)
    hidden = partial.clone()
    hidden[5:40] = torch.nan
    start(
        merge_lists_kernel, (4, 2), hidden.to(device), logs.to(device), offsets.to(device), out,
        out, lse, HEADS=2, D=64, BLOCK_D=64, CHUNK=32, SINKS=False, LSE=True, device=device,
    )  # fmt: skip
    for item, (first, last) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:])):
        total = logs[first:last].double().logsumexp(0)
        if last == first:
            assert not out[item].any()
            assert torch.isinf(lse[item]).all()
            continue
        weights = (logs[first:last].double() - total).exp()[..., None]
        close(out[item], (weights * partial[first:last]).sum(0))
        close(lse[item], total)


def test_reference(close):
    tree = Tree(8, 4, 60, 13)
    case = Case(tree, 4, 2, 64, torch.float32, torch.device("cpu"))
    got, lse = tree_attention(
        case.q, case.k, case.v, case.meta.table, case.meta.kv_lens, tree.list(case.shape), 0.125
    )
    want, want_lse = attention_exact(case.q, case.k, case.v, case.meta, 0.125)
    close(got, want)
    close(lse, want_lse, 1e-5)


def test_each_key_is_counted_once():
    tree = Tree(8, 4, 60, 13)
    shape = shape_for(4, 2, 64, torch.bfloat16, 8, torch.device("cpu"))
    moved, operations = cost(tree.list(shape), tree.kv_lens, 4, 2, 64, 2, 2)
    slots = len({s for r, n in zip(tree.rows, tree.kv_lens) for s in tree.table[r, :n].tolist()})
    assert moved == 2 * slots * 2 * 64 * 2 + 2 * 8 * 4 * 64 * 2
    assert operations == 4 * int(tree.kv_lens.sum()) * 4 * 64


def test_bad_shapes_are_refused(device):
    case = Case(Tree(3, 2, 10, 1), 4, 2, 64, torch.float16, device)
    arguments = (case.k, case.v, case.meta.table, case.meta.kv_lens, case.work, 0.125)
    with pytest.raises(ValueError, match="KV heads"):
        tree_decode(case.q[:, :2].contiguous(), *arguments)
    with pytest.raises(ValueError, match="more than 3"):
        tree_decode(case.q.repeat(2, 1, 1), *arguments)
    with pytest.raises(ValueError, match="blocks of"):
        tree_decode(case.q, *arguments, tile=(32, 32, 4, 2))
