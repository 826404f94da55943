"""The operations together: who takes which items, that nothing of `Ops` is missing, and the tables
of plans."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from ramet.kernels import linear, tuning
from ramet.kernels.attention import cold
from ramet.kernels.attention.dispatch import attend
from ramet.kernels.attention.meta import AttentionMeta
from ramet.kernels.device_ops import DeviceOps
from ramet.kernels.invariant import invariant_linear
from ramet.kernels.ops import Ops
from ramet.kernels.reference.attention import attention_exact
from ramet.kernels.small_batch import Plan
from ramet.kernels.tuning import Product, Table


def paged(items, heads, kv_heads, dim, device, decodes=0, host=False, dtype=torch.float32):
    """Random KV for (q_len, kv_len) items: q, k_cache, v_cache, meta."""
    torch.manual_seed(len(items))
    q_lens, kv_lens = [list(x) for x in zip(*items)]
    width = max(kv_lens)
    slots = 1 + torch.randperm(len(items) * width).view(len(items), width).to(torch.int32)
    starts = torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32)
    meta = AttentionMeta(
        slots.to(device),
        torch.arange(len(items), dtype=torch.int32, device=device),
        starts.to(device),
        torch.tensor(kv_lens, dtype=torch.int32, device=device),
        max(q_lens),
        width,
        decodes,
        q_lens_host=q_lens if host else None,
        kv_lens_host=kv_lens if host else None,
    )
    caches = torch.randn(2, len(items) * width + 1, kv_heads, dim).to(dtype).to(device)
    return torch.randn(sum(q_lens), heads, dim).to(dtype).to(device), *caches, meta


def exact(q, k, v, meta, scale, **options):
    tensors = (x.cpu() for x in (meta.table, meta.rows, meta.q_start, meta.kv_lens))
    cpu = AttentionMeta(*tensors, meta.max_q, meta.max_kv)
    return attention_exact(q.cpu(), k.cpu(), v.cpu(), cpu, scale, **options)


@pytest.mark.parametrize(
    ("items", "decodes"),
    [
        ([(1, 30), (1, 5)], 2),
        ([(1, 30), (1, 5), (7, 20), (40, 40)], 2),
        ([(1, 30), (9, 20)], 0),
        ([(12, 12)], 0),
    ],
)
@pytest.mark.parametrize("window", [0, 9])
def test_every_item_is_attended_to(items, decodes, window, device, close, poisoned):
    q, k, v, meta = paged(items, 4, 2, 64, device, decodes)
    want, want_lse = exact(q, k, v, meta, 0.125, window=window)
    out, lse = poisoned(*q.shape), poisoned(*q.shape[:2])
    attend(q, k, v, meta, 0.125, window, out=out, lse=lse)
    close(out, want)
    close(lse, want_lse)


def test_long_whole_prompts_go_to_torch(device, close, monkeypatch):
    q, k, v, meta = paged([(1, 20), (33, 33), (40, 40)], 4, 2, 64, device, 1, host=True)
    monkeypatch.setattr(cold, "SHORTEST", 32)
    assert cold.all_cold(meta, 1)
    assert not cold.all_cold(meta, 0), "an item of one query is no long prompt"
    want, _ = exact(q, k, v, meta, 0.125)
    close(attend(q, k, v, meta, 0.125), want)
    # The second prompt in consecutive slots: read where it lies, not where the table says.
    k[5:38], v[5:38] = (cache[meta.table[meta.rows[1], :33].long()] for cache in (k, v))
    meta.table[meta.rows[1], :33] = torch.arange(5, 38, dtype=torch.int32)
    want, _ = exact(q, k, v, meta, 0.125)
    meta.runs_host = [-1, 5, -1]
    meta.table[meta.rows[1]] = 0
    close(attend(q, k, v, meta, 0.125), want)
    meta.kv_lens_host = [20, 40, 40]
    assert not cold.all_cold(meta, 1), "an item whose prefix is cached"


def test_invariant_attention_gives_a_token_the_same_bits_however_it_comes(device):
    q, k, v, meta = paged([(50, 50), (3, 70)], 6, 2, 64, device, dtype=torch.bfloat16)
    whole = attend(q, k, v, meta, 0.125, invariant=True)
    for position in (0, 17, 49):
        alone = AttentionMeta(
            meta.table, meta.rows[:1], torch.tensor([0, 1], dtype=torch.int32, device=device),
            torch.tensor([position + 1], dtype=torch.int32, device=device), 1, 50, 1,
        )  # fmt: skip
        one = attend(q[position : position + 1], k, v, alone, 0.125, invariant=True)
        assert torch.equal(one[0], whole[position])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(96, 200), (130, 64)])
def test_invariant_linear(n, k, dtype, device, close, poisoned):
    torch.manual_seed(n)
    x = torch.randn(70, k).to(dtype).to(device)
    weight = (torch.randn(n, k) * k**-0.5).to(dtype).to(device)
    bias = torch.randn(n).to(dtype).to(device)
    whole = invariant_linear(x, weight, bias, out=poisoned(70, n, dtype=dtype))
    close(whole, x.double().cpu() @ weight.double().cpu().T + bias.double().cpu())
    for rows in (slice(0, 1), slice(66, 70)):
        alone = invariant_linear(x[rows].contiguous(), weight, bias)
        assert torch.equal(alone, whole[rows]), "other rows changed these"


def test_invariant_operations_do_not_depend_on_the_batch(device, close):
    torch.manual_seed(4)
    ops = DeviceOps(invariant=True)
    x, norm = torch.randn(70, 64, device=device), torch.randn(64, device=device)
    weight, down = torch.randn(96, 64, device=device), torch.randn(64, 48, device=device)

    def layer(rows):
        residual = x[rows].clone()
        inner = ops.norm_gate_up(residual, norm, 1e-6, weight, "silu")
        ops.linear_add(inner, down, residual)
        return ops.norm_linear(residual, norm, 1e-6, weight)

    whole = layer(slice(0, 70))
    assert torch.equal(layer(slice(3, 4)), whole[3:4])
    plain = DeviceOps()
    inner = plain.norm_gate_up(x, norm, 1e-6, weight, "silu")
    close(inner, ops.norm_gate_up(x, norm, 1e-6, weight, "silu"))


def test_the_device_has_every_operation_with_the_same_arguments():
    for name, method in inspect.getmembers(Ops, inspect.isfunction):
        if name.startswith("_"):
            continue
        ours = list(inspect.signature(getattr(DeviceOps(), name)).parameters)
        theirs = list(inspect.signature(method).parameters)[1:]
        assert ours[: len(theirs)] == theirs, name


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_fused_linears_equal_the_separate_ones(rows, device, close):
    torch.manual_seed(3)
    x = torch.randn(rows, 96, device=device)
    weight, bias = torch.randn(64, 96, device=device), torch.randn(64, device=device)
    norm, residual = torch.randn(96, device=device), torch.randn(rows, 64, device=device)
    wide, other = weight.double(), x.double()
    normed = other / (other.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm.double()
    close(linear.linear(x, weight, bias), other @ wide.T + bias)
    close(linear.norm_linear(x, norm, 1e-6, weight, bias), normed @ wide.T + bias)
    gate, up = (normed @ wide.T).chunk(2, dim=1)
    want = torch.nn.functional.silu(gate) * up
    close(linear.norm_gate_up(x, norm, 1e-6, weight, "silu"), want)
    want = residual.double() + other @ wide.T + bias
    assert linear.linear_add(x, weight, residual, bias) is None
    close(residual, want)


def test_a_table_answers_by_the_next_larger_row_count():
    plan = Plan(16, 64, 4, 4, 4)
    table = Table({"8x32->64": plan, "1x32->64": None, "8x32->64 normed, gated": None})
    assert table.plan(Product(3, 64, 32), torch.bfloat16) == plan
    assert table.plan(Product(1, 64, 32), torch.bfloat16) is None
    assert table.plan(Product(5, 64, 32, gated=True), torch.bfloat16) is None
    assert table.plan(Product(16, 64, 32), torch.bfloat16) is not None, "unmeasured, but small"
    assert table.plan(Product(16, 1 << 15, 1 << 14), torch.bfloat16) is None, "unmeasured, large"
    assert table.plan(Product(2, 64, 32), torch.float32) is None, "no tensor core for float32"


def test_tables_survive_the_disk_and_bad_ones_are_named(tmp_path):
    path = tmp_path / "deep" / "gpu.json"
    plans = {"1x2->3": Plan(2, 1024, 4, 0), "8x2->3 normed, gated": None}
    tuning.write(path, plans)
    assert Table.read(path) == plans
    path.write_text(path.read_text().replace('"format": 2', '"format": 1'))
    assert Table.read(path) == {}, "of another format"
    for body in ({"plans": 3}, {"plans": {"a": [1]}}):
        path.write_text(json.dumps({"format": 2, **body}))
        with pytest.raises(ValueError, match=r"gpu\.json"):
            Table.read(path)
    for text in ("{", "[1]"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"gpu\.json"):
            Table.read(path)


def test_measuring_fills_the_table(device, on_gpu, tmp_path):
    if not on_gpu:
        pytest.skip("times kernels on a GPU")
    table = Table({}, tmp_path / "gpu.json")
    products = [Product(1, 512, 256), Product(8, 512, 256, gated=True)]
    assert len(table.measure(products, device)) == 2
    assert Table.read(tmp_path / "gpu.json") == table.plans
    assert table.measure(products, device) == []


def test_shipped_tables_are_of_this_format():
    for path in (Path(tuning.__file__).parent / "tuned").glob("*.json"):
        assert len(Table.read(path)) > 50, path.name
