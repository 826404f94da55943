"""Times of the kernels alone, on one GPU: under CUDA graphs, over more memory than the caches hold.

    python benchmarks/kernels_gpu.py [--only decode extend linear sampling small] [--sweep]
    [--out FILE]

Each line gives microseconds, bandwidth or operations a second, and the share of what this device
reached in a plain copy or matrix product a moment before. ``--sweep`` also tries the other ways to
cut each kernel.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from ramet.kernels import activation, norm, rope, rows, sampling, small_batch
from ramet.kernels.attention import cold, decode, extend
from ramet.kernels.attention.meta import AttentionMeta
from ramet.kernels.small_batch import Plan
from ramet.kernels.tuning import Product, candidates, graph_seconds

BF16 = torch.bfloat16
SHAPES = {
    # name: (layers, hidden, inner, heads, kv heads, head dim, vocabulary)
    "qwen2.5-1.5b": (28, 1536, 8960, 12, 2, 128, 151936),
    "llama-3.1-8b": (32, 4096, 14336, 32, 8, 128, 128256),
}
BEYOND_CACHE = 160 << 20


class Bench:
    """Runs measurements and prints a line for each."""

    def __init__(self, device: torch.device, sweep: bool) -> None:
        self.device = device
        self.sweep = sweep
        self.rows: list[dict[str, Any]] = []
        pair = torch.empty(2, 1 << 30, dtype=torch.int16, device=device)
        self.bandwidth = pair.nbytes / graph_seconds(lambda: pair[0].copy_(pair[1]), device)
        square = torch.randn(8192, 8192, dtype=BF16, device=device)
        self.flops = 2 * 8192**3 / graph_seconds(lambda: square @ square, device)
        print(f"copy {self.bandwidth / 1e12:.2f} TB/s, product {self.flops / 1e12:.0f} TFLOP/s")

    def time(
        self,
        name: str,
        work: Callable[[], Any],
        cost: tuple[int, int] = (0, 0),
        calls: int = 1,
    ) -> float:
        """Time `work`, which makes `calls` equal calls; print and keep the time of one."""
        try:
            seconds = graph_seconds(work, self.device) / calls
        except Exception as error:
            # One way to cut a kernel that does not fit must not end the run.
            print(f"{name:56} failed: {type(error).__name__}: {str(error)[:120]}", flush=True)
            return float("inf")
        self.rows.append(
            {"name": name, "seconds": seconds, "bytes": cost[0], "operations": cost[1]}
        )
        line = f"{name:56} {seconds * 1e6:9.2f} us"
        if cost[0]:
            rate = cost[0] / seconds
            line += f" {rate / 1e12:6.2f} TB/s {rate / self.bandwidth:5.0%}"
        if cost[1] and cost[1] / self.flops > cost[0] / self.bandwidth:
            rate = cost[1] / seconds
            line += f" {rate / 1e12:6.0f} TFLOP/s {rate / self.flops:5.0%}"
        print(line, flush=True)
        return seconds

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=BF16, device=self.device)

    def copies(self, size: int) -> int:
        return max(2, -(-BEYOND_CACHE // size))


def paged(bench: Bench, items: int, length: int, kv_heads: int, dim: int, q_len: int = 1) -> Any:
    """(k_cache, v_cache, meta) of items of equal lengths, slots shuffled in runs of 16 as the pool
    hands them out."""
    width = -(-length // 16) * 16
    runs = torch.randperm(items * width // 16, device=bench.device)
    slots = (runs[:, None] * 16 + torch.arange(16, device=bench.device)).view(items, width)
    caches = [bench.randn(items * width, kv_heads, dim) for _ in range(2)]
    i32 = {"dtype": torch.int32, "device": bench.device}
    meta = AttentionMeta(
        slots.to(torch.int32),
        torch.arange(items, **i32),
        torch.arange(items + 1, **i32) * q_len,
        torch.full((items,), length, **i32),
        q_len,
        length,
        items if q_len == 1 else 0,
        q_lens_host=[q_len] * items,
        kv_lens_host=[length] * items,
    )
    return *caches, meta


def bench_decode(bench: Bench) -> None:
    for model, items, length in (
        ("llama-3.1-8b", 64, 8192),
        ("llama-3.1-8b", 64, 1024),
        ("llama-3.1-8b", 256, 1024),
        ("llama-3.1-8b", 1, 640),
        ("qwen2.5-1.5b", 64, 8192),
        ("qwen2.5-1.5b", 256, 1024),
        ("qwen2.5-1.5b", 8, 1024),
        ("qwen2.5-1.5b", 1, 640),
        ("qwen2.5-1.5b", 1, 8192),
    ):
        _, _, _, heads, kv_heads, dim, _ = SHAPES[model]
        size = 4 * items * length * kv_heads * dim
        # Small caches would stay in the second-level cache: go through several, as layers do.
        sets = [
            paged(bench, items, length, kv_heads, dim)
            for _ in range(min(bench.copies(size), 28) if size < BEYOND_CACHE else 1)
        ]
        q = bench.randn(items, heads, dim)
        cost = decode.cost(items * length, items, heads, kv_heads, dim, 2, 2)
        name = f"decode {model} {items} x {length}"

        def run(sets: Any = sets, q: torch.Tensor = q, dim: int = dim, **options: Any) -> None:
            for k, v, meta in sets:
                decode.decode(q, k, v, meta, dim**-0.5, pdl=True, **options)

        bench.time(name, run, cost, len(sets))
        tiles = ((64, 4, 2), (64, 8, 3), (32, 4, 3), (32, 2, 3), (128, 4, 3), (128, 8, 3))
        ways = [{"tile": tile} for tile in tiles]
        ways += [{"splits": splits} for splits in (1, 2, 4, 8, 16, 32, 64)]
        for way in ways if bench.sweep else ():
            bench.time(f"  {way}", lambda r=run, w=way: r(**w), cost, len(sets))


def bench_extend(bench: Bench) -> None:
    for model, items, q_len, length in (
        ("llama-3.1-8b", 1, 8192, 8192),
        ("qwen2.5-1.5b", 1, 8192, 8192),
        ("llama-3.1-8b", 1, 2048, 8192),
        ("llama-3.1-8b", 16, 512, 512),
        ("qwen2.5-1.5b", 1, 128, 128),
        ("qwen2.5-1.5b", 64, 60, 2060),
    ):
        _, _, _, heads, kv_heads, dim, _ = SHAPES[model]
        k, v, meta = paged(bench, items, length, kv_heads, dim, q_len)
        q = bench.randn(items * q_len, heads, dim)
        each = extend.cost(q_len, length, heads, kv_heads, dim, 2)
        cost = items * each[0], items * each[1]

        def run(k=k, v=v, meta=meta, q=q, dim=dim, **options: Any) -> None:
            extend.extend(q, k, v, meta, dim**-0.5, **options)

        bench.time(f"extend {model} {items} x {q_len} of {length}", run, cost)
        if cold.all_cold(meta, 0):
            out = torch.empty_like(q)
            bench.time(
                "  by torch on gathered K and V",
                lambda q=q, k=k, v=v, m=meta, o=out, d=dim: cold.cold(q, k, v, m, d**-0.5, out=o),
                cost,
            )
        if bench.sweep and q_len >= 512:
            for tile in (
                (128, 64, 8, 2), (128, 64, 8, 4), (128, 128, 8, 2), (128, 128, 8, 3),
                (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 3), (64, 32, 4, 3), (128, 32, 8, 3),
            ):  # fmt: skip
                bench.time(f"  tile {tile}", lambda r=run, t=tile: r(tile=t), cost)


def bench_linear(bench: Bench) -> None:
    for model in SHAPES:
        _, hidden, inner, heads, kv_heads, dim, vocabulary = SHAPES[model]
        shapes = {
            "qkv": ((heads + 2 * kv_heads) * dim, hidden),
            "out": (hidden, heads * dim),
            "gate and up": (2 * inner, hidden),
            "down": (hidden, inner),
            "head": (vocabulary, hidden),
        }
        for name, (n, k) in shapes.items():
            count = min(bench.copies(2 * n * k), 100)
            weights = [bench.randn(n, k) for _ in range(count)]
            for many in (1, 8):
                x = bench.randn(many, k)
                cost = small_batch.cost(many, n, k, 2)
                title = f"{model} {name} {k} -> {n}, {many} rows"

                def library(x=x, weights=weights) -> None:
                    for weight in weights:
                        F.linear(x, weight)

                def ours(x=x, weights=weights, pdl=True, plan: Plan | None = None) -> None:
                    for weight in weights:
                        small_batch.small_linear(x, weight, pdl=pdl, plan=plan)

                bench.time(f"{title}, library", library, cost, count)
                bench.time("  ours", ours, cost, count)
                bench.time("  ours, no dependent launch", lambda r=ours: r(pdl=False), cost, count)
                scale = bench.randn(k)

                def around(x=x, weights=weights, scale=scale, gated=name == "gate and up") -> None:
                    for weight in weights:
                        if gated:
                            small_batch.norm_gate_up(x, scale, 1e-6, weight, "silu", pdl=True)
                        else:
                            small_batch.norm_linear(x, scale, 1e-6, weight, pdl=True)

                if name in ("qkv", "gate and up"):
                    bench.time("  ours, with the norm and any gate", around, cost, count)
                for plan in candidates(Product(many, n, k)) if bench.sweep else ():
                    bench.time(
                        f"  {tuple(plan)}", lambda r=ours, p=plan: r(plan=p), cost, count
                    )  # fmt: skip
            del weights


def bench_sampling(bench: Bench) -> None:
    vocabulary = 151936
    for count in (1, 64, 256):
        x = 3 * torch.randn(count, vocabulary, device=bench.device)
        cost = rows.cost(count, vocabulary, 4)

        def full(value: float, dtype=torch.float32, count=count) -> torch.Tensor:
            return torch.full((count,), value, dtype=dtype, device=bench.device)

        seeds = torch.arange(count, device=bench.device)
        bench.time(f"greedy {count} rows", lambda x=x: rows.greedy(x, pdl=True), cost)
        bench.time("  torch.argmax", lambda x=x: x.argmax(-1), cost)
        ids = full(7, torch.int32)
        bench.time("  log-probs", lambda x=x, i=ids: rows.token_logprobs(x, i, pdl=True), cost)
        for name, k, p in (("all", 0, 1.0), ("top-k 50", 50, 1.0), ("top-p 0.9", 0, 0.9)):
            asked = (full(0.8), full(k, torch.int32), full(p), full(0.0), seeds, seeds)
            bench.time(
                f"  sample {name}",
                lambda x=x, a=asked, f=name != "all": sampling.sample(x, *a, filtered=f, pdl=True),
                cost,
            )


def bench_small(bench: Bench) -> None:
    """Kernels that only move activations."""
    for model in SHAPES:
        _, hidden, inner, heads, kv_heads, dim, _ = SHAPES[model]
        for tokens in (1, 256, 8192):
            x, other = bench.randn(2, tokens, hidden)
            wide, weight = bench.randn(tokens, 2 * inner), bench.randn(hidden)
            k, v, meta = paged(bench, 1, max(tokens, 16), kv_heads, dim)
            table = torch.randn(tokens, dim, device=bench.device)
            positions = torch.arange(tokens, dtype=torch.int32, device=bench.device)
            qkv = bench.randn(tokens, (heads + 2 * kv_heads) * dim)
            rotary = (
                qkv,
                positions,
                meta.table[0, :tokens].long(),
                table,
                k,
                v,
                heads,
                kv_heads,
                dim,
            )
            name, costs = f"{model} {tokens} tokens", norm.cost(tokens, hidden, 2, add=True)
            normed = (x, other, weight)
            bench.time(f"norm {name}", lambda a=normed: norm.add_rms_norm(*a, 1e-6), costs)
            costs = activation.cost(tokens, inner, 2)
            bench.time(f"gate {name}", lambda w=wide: activation.gate(w, "silu"), costs)
            costs = rope.cost(tokens, heads, kv_heads, dim, 2, 2)
            bench.time(f"rotary and write {name}", lambda a=rotary: rope.rope_write(*a), costs)


SECTIONS = {
    "decode": bench_decode,
    "extend": bench_extend,
    "linear": bench_linear,
    "sampling": bench_sampling,
    "small": bench_small,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--sweep", action="store_true", help="try other ways to cut each kernel")
    parser.add_argument("--out", type=Path, help="write the rows as JSON here")
    options = parser.parse_args()
    torch.manual_seed(0)
    bench = Bench(torch.device("cuda", torch.cuda.current_device()), options.sweep)
    for name in options.only:
        print(f"-- {name}")
        SECTIONS[name](bench)
        torch.cuda.empty_cache()
    if options.out:
        report = {
            "device": torch.cuda.get_device_name(bench.device),
            "torch": torch.__version__,
            "copy": bench.bandwidth,
            "product": bench.flops,
            "rows": bench.rows,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
