"""A decode step's kernels without the host: all layers, the head, the largest logit, as one CUDA
graph.

    python benchmarks/step_gpu.py [--model qwen2.5-1.5b] [--batch 1:384 8:1024] [--no-measure]
    [--out FILE]

First the linears' plans that no table has are measured, also those that an engine leaves out at its
start; then the step is timed whole, without attention, which shows what that costs, and without
dependent launch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from ramet.kernels.attention.meta import AttentionMeta
from ramet.kernels.device_ops import DeviceOps
from ramet.kernels.operands import Norm, Rotation
from ramet.kernels.tuning import ROW_BUCKETS, Product, bucket, graph_seconds, table_for

BF16 = torch.bfloat16
SHAPES = {
    # name: (layers, hidden, inner, heads, kv heads, head dim, vocabulary)
    "qwen2.5-1.5b": (28, 1536, 8960, 12, 2, 128, 151936),
    "llama-3.1-8b": (32, 4096, 14336, 32, 8, 128, 128256),
}
COPY = 4.25e12
"""Bytes a second of a plain copy on an H200."""


class Model:
    """Random weights of one shape, and its step over KV of equal lengths."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.layers, hidden, inner, heads, kv_heads, dim, vocabulary = SHAPES[name]
        self.device = device
        self.shape = (heads, kv_heads, dim)
        self.sizes = (hidden, inner, vocabulary)
        qkv = (heads + 2 * kv_heads) * dim
        self.weights = [
            [
                self.randn(*shape) * shape[1] ** -0.5
                for shape in (
                    (qkv, hidden),
                    (hidden, heads * dim),
                    (2 * inner, hidden),
                    (hidden, inner),
                )
            ]
            for _ in range(self.layers)
        ]
        self.norm = self.randn(hidden)
        self.embedding, self.head = self.randn(vocabulary, hidden), self.randn(vocabulary, hidden)
        self.bytes = 2 * sum(w.numel() for layer in [*self.weights, [self.head]] for w in layer)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=BF16, device=self.device)

    def products(self) -> list[Product]:
        """What an engine measures at its start."""
        (hidden, inner, vocabulary), (heads, kv_heads, dim) = self.sizes, self.shape
        qkv = (heads + 2 * kv_heads) * dim
        return [
            product
            for rows in ROW_BUCKETS
            for product in (
                Product(rows, qkv, hidden, normed=True),
                Product(rows, hidden, heads * dim),
                Product(rows, inner, hidden, gated=True),
                Product(rows, hidden, inner),
                Product(rows, vocabulary, hidden),
            )
        ]

    def cache(self, items: int, length: int) -> None:
        """Take KV for `items` of `length` tokens, slots shuffled in runs of 16."""
        kv_heads, dim = self.shape[1:]
        width = -(-length // 16) * 16
        self.kv = torch.randn(
            (self.layers, 2, items * width, kv_heads, dim), dtype=BF16, device=self.device
        )
        runs = torch.randperm(items * width // 16, device=self.device)
        table = (runs[:, None] * 16 + torch.arange(16, device=self.device)).view(items, width)
        i32 = {"dtype": torch.int32, "device": self.device}
        lengths = torch.full((items,), length, **i32)
        starts = torch.arange(items + 1, **i32)
        self.meta = AttentionMeta(
            table.to(torch.int32), starts[:-1].clone(), starts, lengths, 1, length, items
        )
        self.ids = torch.zeros(items, **i32)
        self.angles = torch.randn(length, dim, device=self.device)
        self.positions, self.slots = lengths - 1, table[:, length - 1].contiguous()

    def step(self, ops: DeviceOps, attention: bool = True) -> None:
        dim = self.shape[2]
        norm = Norm(self.norm, 1e-6)
        x, normed = ops.embed(self.ids, self.embedding), None
        for i, (qkv_w, out_w, up_w, down_w) in enumerate(self.weights):
            k, v = self.kv[i]
            rotation = Rotation(self.positions, self.slots, self.angles, k, v, *self.shape)
            q = None
            if normed is None:
                q = ops.norm_rotate(x, self.norm, 1e-6, qkv_w, None, 0.0, rotation)
            if q is None:
                qkv = ops.norm_linear(x, self.norm, 1e-6, qkv_w, normed=normed)
                q = ops.rope_write(
                    qkv, self.positions, self.slots, self.angles, k, v, *self.shape
                )  # fmt: skip
            y = ops.attention(q, k, v, self.meta, dim**-0.5) if attention else q
            normed = ops.linear_add(y.view(len(x), -1), out_w, x, norm=norm)
            inner = ops.norm_gate_up(x, self.norm, 1e-6, up_w, "silu", normed=normed)
            normed = ops.linear_add(inner, down_w, x, norm=norm)
        if normed is None:
            normed = ops.rms_norm(x, self.norm, 1e-6)
        ops.greedy(ops.head(normed, self.head))


def ways(model: Model) -> dict[str, Callable[[], None]]:
    """What is timed, by name."""
    plain, halted = DeviceOps(), DeviceOps(pdl=False)
    return {
        "whole": lambda: model.step(plain),
        "no attention": lambda: model.step(plain, attention=False),
        "no dependent launch": lambda: model.step(halted),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--batch", nargs="+", default=["1:384", "8:1024"], help="requests:tokens")
    parser.add_argument("--no-measure", action="store_true", help="leave the plans as they are")
    parser.add_argument(
        "--rows", nargs="+", type=int, choices=ROW_BUCKETS, default=list(ROW_BUCKETS),
        help="row counts whose plans are measured where no table has them",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="write the rows as JSON here")
    options = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    rows: list[dict[str, object]] = []
    for name in options.model:
        model = Model(name, device)
        if not options.no_measure:
            wanted = [p for p in model.products() if p.rows in options.rows]
            print(*table_for(device).measure(wanted, device), sep="\n", flush=True)
        for one in options.batch:
            items, length = map(int, one.split(":"))
            model.cache(items, length)
            table = table_for(device)
            for product in model.products():
                if product.rows == bucket(min(items, ROW_BUCKETS[-1])):
                    print(f"  {product.key}: {table.plan(product, BF16)}")
            kv_width = model.shape[1] * model.shape[2]
            floor = (model.bytes + 4 * model.layers * items * length * kv_width) / COPY
            for way, work in ways(model).items():
                seconds = graph_seconds(work, device)
                rows.append({"model": name, "batch": one, "way": way, "seconds": seconds})
                print(
                    f"{name} {one:8} {way:44} {seconds * 1e3:7.3f} ms  floor {floor * 1e3:.3f} "
                    f"({floor / seconds:.0%})",
                    flush=True,
                )
        del model
        torch.cuda.empty_cache()
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
