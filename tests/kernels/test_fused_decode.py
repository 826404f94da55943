"""A fused decode step against rotary embedding, KV write and attention one after the other, in
float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from ramet.kernels.attention.fused import fused_decode
from ramet.kernels.attention.meta import AttentionMeta
from ramet.kernels.reference.attention import attention_exact
from ramet.kernels.reference.rope import rope_write

SCALE = 0.11


class Case:
    """Items of given lengths whose newest K and V are not written yet: their slots hold NaN."""

    def __init__(self, lengths, heads, kv_heads, dim, dtype, device, normed=False, rotary=None):
        torch.manual_seed(sum(lengths) + dim)
        self.shape = (heads, kv_heads, dim)
        items, width = len(lengths), max(*lengths, 1)
        slots = 1 + torch.randperm(items * width).view(items, width)
        caches = torch.randn(2, items * width + 1, kv_heads, dim)
        for i, length in enumerate(lengths):
            caches[:, slots[i, max(length - 1, 0) :]] = torch.nan
        self.caches = caches.to(dtype).to(device)
        self.qkv = torch.randn(items, (heads + 2 * kv_heads) * dim).to(dtype).to(device)
        angle = torch.arange(width)[:, None] * 0.3 ** torch.arange((rotary or dim) // 2)
        self.cos_sin = torch.cat([angle.cos(), angle.sin()], 1).float().to(device)
        self.norms = [torch.randn(dim).to(dtype).to(device) if normed else None for _ in range(2)]
        self.sinks = torch.randn(heads).to(device)
        self.meta = AttentionMeta(
            slots.to(torch.int32).to(device),
            torch.arange(items, dtype=torch.int32, device=device),
            torch.arange(items + 1, dtype=torch.int32, device=device),
            torch.tensor(lengths, dtype=torch.int32, device=device),
            1,
            width,
            items,
        )
        self.new_slots = slots[torch.arange(items), (torch.tensor(lengths) - 1).clamp(min=0)]
        self.live = [i for i, length in enumerate(lengths) if length]
        self.counters = torch.zeros(items * kv_heads + 1, dtype=torch.int32, device=device)

    def exact(self, **options):
        """(output, caches), in float64 on the CPU."""
        heads, kv_heads, dim = self.shape
        caches = self.caches.double().cpu()
        live = torch.tensor(self.live, dtype=torch.int64)
        norms = [None if one is None else one.double().cpu() for one in self.norms]
        q = torch.zeros(len(self.qkv), heads, dim, dtype=torch.float64)
        q[live] = rope_write(
            self.qkv.double().cpu()[live], (self.meta.kv_lens.cpu() - 1)[live],
            self.new_slots[live], self.cos_sin.cpu(), *caches, heads, kv_heads, dim, *norms,
            1e-6, 1.0,
        )  # fmt: skip
        meta = AttentionMeta(
            self.meta.table.cpu(), self.meta.rows.cpu(), self.meta.q_start.cpu(),
            self.meta.kv_lens.cpu(), 1, self.meta.max_kv,
        )  # fmt: skip
        return attention_exact(q, *caches, meta, SCALE, **options)[0], caches

    def check(self, close, poisoned, splits=None, with_sinks=False, **options):
        heads, kv_heads, dim = self.shape
        sinks = self.sinks if with_sinks else None
        want, caches = self.exact(sinks=None if sinks is None else sinks.cpu(), **options)
        out = poisoned(len(self.qkv), heads, dim, dtype=self.qkv.dtype)
        # The second time the counters must be as they were; then `merge` does it.
        for tail in (True, True, False):
            fused_decode(
                self.qkv, self.cos_sin, *self.caches, self.meta, heads, kv_heads, dim, SCALE,
                self.counters, q_norm=self.norms[0], k_norm=self.norms[1], offset=1.0,
                sinks=sinks, out=out, splits=splits, tail=tail, **options,
            )  # fmt: skip
            close(out, want)
            assert not self.counters.any(), "the counters are zero again"
        written = self.new_slots[torch.tensor(self.live, dtype=torch.int64)]
        close(self.caches.cpu()[:, written], caches[:, written])
        others = torch.ones(self.caches.shape[1], dtype=torch.bool)
        others[written] = False
        assert torch.equal(
            self.caches.cpu()[:, others].double().nan_to_num(7), caches[:, others].nan_to_num(7)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@settings(max_examples=6, derandomize=True, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 64, 65, 129, 300]), min_size=1, max_size=3),
    heads=st.sampled_from([(2, 2), (6, 2), (9, 3), (8, 1)]),
    dim=st.sampled_from([64, 128]),
    splits=st.sampled_from([1, 3, None]),
)
def test_fused_decode(lengths, heads, dim, splits, dtype, device, close, poisoned):
    Case(lengths, *heads, dim, dtype, device).check(close, poisoned, splits)


@pytest.mark.parametrize(("dim", "rotary"), [(80, 80), (96, 48), (256, 256)])
def test_other_head_sizes_with_norms(dim, rotary, device, close, poisoned):
    case = Case([200, 3], 4, 2, dim, torch.bfloat16, device, normed=True, rotary=rotary)
    case.check(close, poisoned, 2)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 40},
        {"window": 150, "softcap": 2.0},
        {"with_sinks": True},
        {"with_sinks": True, "window": 100},
    ],
)
def test_options(options, device, close, poisoned):
    case = Case([260, 0, 1, 90], 4, 2, 64, torch.float32, device)
    case.check(close, poisoned, 3, **options)


def test_what_does_not_fit_is_refused(device):
    case = Case([5], 4, 2, 64, torch.float32, device)
    arguments = (case.qkv, case.cos_sin, *case.caches, case.meta)
    with pytest.raises(ValueError, match="counters"):
        fused_decode(*arguments, 4, 2, 64, SCALE, case.counters[:1])
    with pytest.raises(ValueError, match="qkv must be"):
        fused_decode(*arguments, 5, 2, 64, SCALE, case.counters)
