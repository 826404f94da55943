"""Decode, extension and merge against the formula in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from ramet.kernels.attention.decode import FEW, decode
from ramet.kernels.attention.extend import extend
from ramet.kernels.attention.merge import merge
from ramet.kernels.attention.meta import AttentionMeta
from ramet.kernels.attention.splits import choose_splits

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


class Case:
    """Random paged KV for items of given (q_len, kv_len), slots shuffled, unused slots full of
    NaN."""

    def __init__(self, items, heads, kv_heads, dim, dtype, device, kv_dtype=None, seed=0):
        torch.manual_seed(seed)
        self.q_lens, self.kv_lens = [list(x) for x in zip(*items)]
        total = sum(self.kv_lens)
        slots = total + 5
        width = max(self.kv_lens) + 3
        caches = torch.full((2, slots, kv_heads, dim), torch.nan)
        free = (torch.randperm(slots - 1) + 1).tolist()
        table = torch.full((len(items) + 2, width), slots - 1, dtype=torch.int32)
        rows = torch.randperm(len(items) + 2)[: len(items)]
        for row, length in zip(rows.tolist(), self.kv_lens):
            own = torch.tensor([free.pop() for _ in range(length)], dtype=torch.int32)
            table[row, :length] = own
            caches[:, own.long()] = torch.randn(2, length, kv_heads, dim)
        starts = torch.tensor([0, *self.q_lens]).cumsum(0).to(torch.int32)
        self.q = torch.randn(int(starts[-1]), heads, dim).to(dtype).to(device)
        self.k, self.v = caches.to(kv_dtype or dtype).to(device)
        self.sinks = torch.randn(heads).to(device)
        self.meta = AttentionMeta(
            table=table.to(device),
            rows=rows.to(torch.int32).to(device),
            q_start=starts.to(device),
            kv_lens=torch.tensor(self.kv_lens, dtype=torch.int32, device=device),
            max_q=max(self.q_lens),
            max_kv=max(self.kv_lens),
        )

    def exact(self, scale, window=0, softcap=0.0, sinks=None, k_scale=1.0, v_scale=1.0):
        """(out, lse) by the formula, in float64 on the CPU."""
        q, k, v = (x.cpu().double() for x in (self.q, self.k.float(), self.v.float()))
        group = q.shape[1] // k.shape[1]
        out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
        t = 0
        for row, q_len, kv_len in zip(self.meta.rows.tolist(), self.q_lens, self.kv_lens):
            for j in range(q_len):
                last = kv_len - q_len + j
                low = max(0, last + 1 - window) if window else 0
                if last >= 0:
                    slots = self.meta.table[row, low : last + 1].long().cpu()
                    keys = k[slots].repeat_interleave(group, 1) * k_scale
                    values = v[slots].repeat_interleave(group, 1) * v_scale
                    s = torch.einsum("hd,nhd->hn", q[t], keys) * scale
                    s = softcap * torch.tanh(s / softcap) if softcap else s
                    whole = s if sinks is None else torch.cat([s, sinks.cpu()[:, None]], 1)
                    lse[t] = whole.logsumexp(1)
                    out[t] = torch.einsum("hn,nhd->hd", (s - lse[t][:, None]).exp(), values)
                t += 1
        return out, lse

    def check(self, run, close, poisoned, **options):
        """Run a kernel into poisoned outputs and compare both results."""
        scale = self.q.shape[2] ** -0.5
        sinks = self.sinks if options.pop("with_sinks", False) else None
        extra = {key: options.pop(key) for key in ("splits", "split_tokens") if key in options}
        want, want_lse = self.exact(scale, sinks=sinks, **options)
        out = poisoned(*self.q.shape, dtype=self.q.dtype)
        lse = poisoned(*self.q.shape[:2])
        run(
            self.q, self.k, self.v, self.meta, scale, sinks=sinks, out=out, lse=lse,
            **options, **extra,
        )  # fmt: skip
        close(out, want)
        empty = torch.isinf(want_lse)
        assert torch.equal(torch.isinf(lse.cpu()), empty)
        assert not out.cpu()[empty].any(), "an item without keys gives zeros"
        seen = lse.cpu()[~empty]
        if len(seen):
            tolerance = 1e-5 if self.q.dtype == torch.float32 else 2e-3
            assert (seen - want_lse[~empty]).abs().max() < tolerance * 10


HEADS = [(2, 2), (4, 1), (6, 2), (9, 3), (7, 1)]


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=5, derandomize=True, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 5, 31, 64, 65, 130, 200]), min_size=1, max_size=3),
    heads=st.sampled_from(HEADS),
    dim=st.sampled_from([64, 128]),
    splits=st.sampled_from([1, 2, 5]),
)
def test_decode(lengths, heads, dim, splits, dtype, device, close, poisoned):
    case = Case([(1, n) for n in lengths], *heads, dim, dtype, device)
    case.check(decode, close, poisoned, splits=splits)


@pytest.mark.parametrize("dim", [80, 96, 256])
def test_decode_other_head_sizes(dim, device, close, poisoned):
    Case([(1, 70), (1, 9)], 4, 2, dim, torch.bfloat16, device).check(decode, close, poisoned)


def test_decode_of_many_heads_of_one_kv_head(device, close, poisoned):
    Case([(1, 40)], 40, 2, 64, torch.float16, device).check(decode, close, poisoned, splits=2)


OPTIONS = [
    {"window": 7},
    {"window": 100},
    {"softcap": 3.0},
    {"with_sinks": True},
    {"window": 70, "softcap": 5.0, "with_sinks": True},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("splits", [1, 3])
def test_decode_options(options, splits, device, close, poisoned):
    case = Case([(1, 150), (1, 0), (1, 3), (1, 90)], 4, 2, 64, torch.float32, device)
    case.check(decode, close, poisoned, splits=splits, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 70])
def test_decode_cut_at_fixed_lengths_gives_the_same_bits_in_any_batch(window, dtype, device):
    # With two KV heads: together more pairs than `FEW`, alone fewer.
    items = [(1, 200), (1, 40), (1, 131), *[(1, 90 + i) for i in range(6)]]
    assert 2 < FEW < 2 * len(items)
    case = Case(items, 4, 2, 64, dtype, device)
    case.meta.max_kv = 256
    whole = decode(case.q, case.k, case.v, case.meta, 0.125, window, split_tokens=64)
    want, _ = case.exact(0.125, window)
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    assert (whole.double().cpu() - want).norm() < bound * want.norm()
    for i in range(3):
        meta = AttentionMeta(
            case.meta.table, case.meta.rows[i : i + 1], case.meta.q_start[:2],
            case.meta.kv_lens[i : i + 1], 1, 256,
        )  # fmt: skip
        q = case.q[i : i + 1]
        alone = decode(q, case.k, case.v, meta, 0.125, window, split_tokens=64)
        assert torch.equal(alone[0], whole[i])


@pytest.mark.parametrize("run", [decode, extend])
def test_float8_cache(run, device, close, poisoned):
    case = Case([(1, 100), (1, 33)], 4, 2, 64, torch.bfloat16, device, kv_dtype=torch.float8_e4m3fn)
    case.check(run, close, poisoned, k_scale=0.5, v_scale=2.0)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=6, derandomize=True, deadline=None)
@given(
    items=st.lists(
        st.tuples(st.sampled_from([1, 2, 9, 33]), st.sampled_from([0, 1, 63, 64, 130])),
        min_size=1,
        max_size=3,
    ),
    heads=st.sampled_from(HEADS),
    dim=st.sampled_from([64, 128]),
    splits=st.sampled_from([1, 2]),
)
def test_extend(items, heads, dim, splits, dtype, device, close, poisoned):
    case = Case([(n, n + before) for n, before in items], *heads, dim, dtype, device)
    case.check(extend, close, poisoned, splits=splits)


@pytest.mark.parametrize("dim", [80, 96, 256])
def test_extend_other_head_sizes(dim, device, close, poisoned):
    Case([(20, 90), (3, 3)], 4, 2, dim, torch.bfloat16, device).check(extend, close, poisoned)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("splits", [1, 2])
def test_extend_options(options, splits, device, close, poisoned):
    case = Case([(40, 150), (1, 0), (5, 5), (17, 300)], 4, 2, 64, torch.float32, device)
    case.check(extend, close, poisoned, splits=splits, **options)


def test_extend_of_long_chunks(device, on_gpu, close, poisoned):
    """Rows of several tiles, whole and masked tiles of keys, more items than one lookup sees."""
    case = Case([(150, 400), (130, 130)], 6, 2, 64, torch.bfloat16, device)
    case.check(extend, close, poisoned, splits=1)
    if on_gpu:
        items = [(1 + 37 * i % 300, 37 * i % 300 + 1 + i) for i in range(256)]
        Case(items, 4, 2, 128, torch.bfloat16, device).check(extend, close, poisoned)


def test_extend_finds_its_item_among_many(device, close, poisoned):
    case = Case([(1, 2)] * 130 + [(3, 4)], 1, 1, 64, torch.float16, device)
    tiles = case.q.shape[0] // 16 + 131
    assert tiles <= 150
    case.check(extend, close, poisoned, splits=1)


def test_extend_skips_the_items_that_decode(device, close):
    case = Case([(1, 50), (1, 9), (20, 60), (4, 4)], 4, 2, 64, torch.float32, device)
    want, _ = case.exact(0.125)
    out = decode(case.q[:2], case.k, case.v, case.meta, 0.125)
    rest = extend(case.q[2:], case.k, case.v, case.meta, 0.125, first_item=2, splits=2)
    close(torch.cat([out, rest]), want)


def test_padding_rows_stay_finite(device):
    """More rows than queries, as a captured step of a fixed size has them."""
    case = Case([(3, 70)], 2, 1, 64, torch.float32, device)
    q = torch.cat([case.q, torch.full_like(case.q[:2], torch.nan)])
    out = extend(q, case.k, case.v, case.meta, 0.125, splits=2)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=5, derandomize=True, deadline=None)
@given(parts=st.sampled_from([1, 2, 5, 17, 40]), dim=st.sampled_from([64, 80]))
def test_merge(parts, dim, dtype, device, close, poisoned):
    torch.manual_seed(parts)
    partial = torch.randn(parts, 3, 2, dim, device=device)
    lse = 4 * torch.randn(parts, 3, 2, device=device)
    empty = torch.rand(parts, 3, 2, device=device) < 0.3
    empty[:, 1, 1] = True
    lse[empty], partial[empty] = -torch.inf, torch.nan
    out, total = poisoned(3, 2, dim, dtype=dtype), poisoned(3, 2)
    merge(partial, lse, out=out, lse_out=total)
    exact = lse.double().logsumexp(0)
    weight = (lse.double() - exact).exp().nan_to_num(0.0)
    want = (weight[..., None] * partial.double().nan_to_num(0.0)).sum(0)
    close(out, want)
    some = ~torch.isinf(exact)
    assert torch.isinf(total[~some]).all()
    assert (total[some].double() - exact[some]).abs().max() < 1e-5


@given(work=st.integers(1, 4096), max_kv=st.integers(0, 1 << 17))
@settings(max_examples=50, derandomize=True, deadline=None)
def test_splits_fill_the_device_without_being_shorter_than_they_should(work, max_kv):
    splits = choose_splits(work, max_kv, 264)
    assert 1 <= splits <= max(1, -(-max_kv // 64))
    if work >= 10 * 264:
        assert splits == 1


def test_bad_shapes_are_refused(device):
    case = Case([(1, 4)], 4, 2, 64, torch.float32, device)
    for run in (decode, extend):
        with pytest.raises(ValueError, match="share"):
            run(case.q[:, :3].contiguous(), case.k, case.v, case.meta, 1.0)
        with pytest.raises(ValueError, match="caches must be"):
            run(case.q, case.k[..., :32], case.v, case.meta, 1.0)
