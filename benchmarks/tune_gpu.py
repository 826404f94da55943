"""Which plans of its linears make a whole decode step the fastest: how `kernels/tuned/` was made.

    for i in 0 1 2 3; do python benchmarks/tune_gpu.py --compile $i/4 & done; wait
    python benchmarks/tune_gpu.py --out kernels/tuned/nvidia-h200.json

An engine that has no table measures each linear by itself. In a step kernels overlap, and one is
also good for what it leaves to its neighbours: the plans found here are worth 3 to 7 % of a step
more. One product after the other is tried in all ways, the best three again; what is worth a
five-hundredth of the step is kept. Compiling takes longer than timing, hence the first command,
whose processes fill Triton's cache.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

import torch
from ramet.kernels.device_ops import DeviceOps
from ramet.kernels.mid_batch import LARGEST_WIDTH, Tiles
from ramet.kernels.small_batch import MOST_ROWS, Plan
from ramet.kernels.tuning import ROW_BUCKETS, Product, graph_seconds, table_for, write
from step_gpu import SHAPES, Model
from triton.runtime.errors import OutOfResources

MULTIPROCESSORS = 132
SHARED_BYTES = 227 << 10
WORTH = 0.998
CONTEXT = 1150
SECONDS = 0.012
"""Of steps in one timing, of which the best of three counts."""
Way = Plan | Tiles | None


def ways(product: Product) -> list[Way]:
    """Plans of a product: those of its number of rows; the library, where that takes it too."""
    rows, n = product.rows, product.n
    found: list[Way] = list(one_row(product)) if rows == 1 else list(tiles(product))
    if 1 < rows <= MOST_ROWS and n <= LARGEST_WIDTH:
        cuts = [(16, 64, 4, 4, 4), (16, 128, 4, 3, 4), (16, 64, 8, 3, 8), (32, 64, 4, 4, 4)]
        found += [Plan(*cut) for cut in cuts]
    return [*found, None] if rows > 64 else found


def one_row(product: Product) -> Iterator[Plan]:
    widths = [(2, 512), (4, 512), (8, 512), (2, 1024), (4, 1024), (8, 1024), (2, 2048), (4, 2048)]
    for block_n, block_k in widths:
        elements = block_n * block_k * (2 if product.gated else 1)
        for warps, before in itertools.product((2, 4, 8), (1, 2, 3, 4)):
            each = elements // (32 * warps)
            if 16 <= each <= 64 and each * before <= 256 and block_k * (before - 1) < product.k:
                yield Plan(block_n, block_k, warps, 0, before=before)


def tiles(product: Product) -> Iterator[Tiles]:
    rows, n, k, gated, _ = product
    shapes = [(64, 64, 4, 4), (64, 64, 4, 6), (64, 128, 4, 4), (64, 256, 4, 3), (128, 64, 8, 3)]
    for block_n, block_k, warps, stages in [*shapes, (128, 64, 8, 4), (128, 128, 8, 3)]:
        if stages * block_k * (block_n + max(16, rows)) * 2 > SHARED_BYTES:
            continue
        programs = n * (2 if gated else 1) / block_n
        many = (1,) if gated or n > LARGEST_WIDTH else (1, 2, 3)
        wanted = {max(1, round(MULTIPROCESSORS * one / programs)) for one in many}
        slices = {min(s, 16, max(1, k // block_k // 2)) for s in wanted} if len(many) > 1 else {1}
        for cut in sorted(slices):
            yield Tiles(block_n, block_k, warps, stages, cut)


class Search:
    """One model's step, with the plans of the device's table."""

    def __init__(self, name: str, layers: int | None = None) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        if layers is not None:
            SHAPES[name] = (layers, *SHAPES[name][1:])
        self.model = Model(name, device)
        self.plans = table_for(device).plans
        self.ops = DeviceOps()
        self.repeats = 2

    def enter(self, rows: int) -> list[Product]:
        self.model.cache(rows, 384 if rows == 1 else CONTEXT)
        self.repeats = 2
        return [one for one in self.model.products() if one.rows == rows]

    def compile(self, product: Product, way: Way) -> None:
        """Have the kernels of one way ready."""
        kept = self.plans.get(product.key)
        self.plans[product.key] = way
        try:
            self.model.step(self.ops)
            torch.cuda.synchronize()
        except OutOfResources:
            pass
        finally:
            self.plans[product.key] = kept

    def seconds(self, product: Product, way: Way, times: int = 1) -> float:
        """Of a step, by the best of so many trials; endless where the device refuses."""
        kept = self.plans.get(product.key)
        self.plans[product.key] = way
        try:
            work, device = lambda: self.model.step(self.ops), self.model.device
            return min(graph_seconds(work, device, self.repeats) for _ in range(times))
        except OutOfResources:
            return float("inf")
        finally:
            self.plans[product.key] = kept

    def best(self, product: Product) -> None:
        """Put the best way of a product into the table."""
        kept = self.plans.get(product.key)
        ranked = sorted(ways(product), key=lambda way: self.seconds(product, way))
        again = {way: self.seconds(product, way, 2) for way in (kept, *ranked[:3])}
        found = min(again, key=lambda way: again[way])
        if again[found] < WORTH * again[kept]:
            self.plans[product.key] = found
        print(
            f"  {product.key}: {again[kept] * 1e3:.3f} ms by {kept}, {again[found] * 1e3:.3f} by "
            f"{found}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument(
        "--rows", nargs="+", type=int, choices=ROW_BUCKETS, default=list(ROW_BUCKETS)
    )
    parser.add_argument("--compile", metavar="I/N", help="only compile the I-th of N parts")
    parser.add_argument("--out", type=Path, help="write the whole table here")
    options = parser.parse_args()
    if options.compile:
        part, parts = map(int, options.compile.split("/"))
        for name in options.model:
            search = Search(name, layers=1)
            jobs = [(r, p, way) for r in options.rows for p in search.enter(r) for way in ways(p)]
            entered = 0
            for rows, product, way in jobs[part::parts]:
                if rows != entered:
                    search.enter(entered := rows)
                search.compile(product, way)
        return
    for name in options.model:
        search = Search(name)
        for rows in options.rows:
            products = search.enter(rows)
            first = search.seconds(products[0], search.plans.get(products[0].key), 2)
            search.repeats = min(max(int(SECONDS / first), 2), 10)
            for product in products:
                search.best(product)
            last = search.seconds(products[0], search.plans.get(products[0].key), 2)
            print(f"{name}, {rows} rows: {first * 1e3:.3f} → {last * 1e3:.3f} ms", flush=True)
            if options.out:
                write(options.out, search.plans)
        del search
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
