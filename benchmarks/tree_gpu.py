"""Tree attention in decode against plain decode attention, one layer's attention on one GPU.

    python benchmarks/tree_gpu.py [--only NAME ...] [--sweep] [--out FILE]

Each line: microseconds of one layer (a CUDA graph goes through several caches, so that keys come
from memory), and for tree attention the share of its floor: keys once, or products. ``--sweep``
also tries other tiles, and how short a shared prefix may be.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ramet.kernels.attention.decode import decode
from ramet.kernels.attention.meta import AttentionMeta
from ramet.kernels.attention.tree import (
    cost,
    shape_for,
    shared_tile,
    tree_decode,
    work_for,
)
from ramet.kernels.attention.worklist import list_shape, make_list
from ramet.kernels.tuning import graph_seconds
from ramet.runtime.scheduler.rows import Rows
from ramet.runtime.scheduler.segments import SegmentFinder, SharingCost

BF16 = torch.bfloat16
SHAPES = {"qwen2.5-1.5b": (12, 2, 128), "llama-3.1-8b": (32, 8, 128)}
BEYOND_CACHE = 160 << 20
BANDWIDTH, PRODUCTS = 4.25e12, 772e12
"""Of an H200, measured with a plain copy and a plain matrix product."""
TILES = ((64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 8, 3), (64, 32, 4, 3), (64, 128, 4, 2),
         (64, 128, 8, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2))  # fmt: skip
LISTS = (0.25, 0.5, 2.0, 4.0)
"""A device with so many times the multiprocessors: lists of fewer or more pieces."""


@dataclass
class Work:
    """``levels``: (branches a branch of the level above has, tokens of each); then ``own`` tokens
    of each leaf."""

    levels: tuple[tuple[int, int], ...]
    own: int

    def rows(self) -> tuple[Rows, np.ndarray]:
        """Rows of slots, handed out in shuffled runs of 16 as the pool does."""
        lists: list[list[int]] = [[]]
        counter = 0
        for branches, tokens in (*self.levels, (1, self.own)):
            grown = []
            for path in lists:
                for _ in range(branches):
                    grown.append([*path, *range(counter, counter + tokens)])
                    counter += tokens
            lists = grown
        runs = np.random.default_rng(0).permutation(-(-counter // 16) + 1).astype(np.int32)
        place = (runs[:, None] * 16 + np.arange(16, dtype=np.int32)).ravel()
        rows = Rows(len(lists), len(lists[0]))
        rows.slots[:] = place[np.array(lists)]
        return rows, np.full(len(lists), len(lists[0]), np.int32)


CASES = {
    "64 of one 8k, 256 own": Work(((1, 8192), (64, 0)), 256),
    "64 of one 8k, 32 own": Work(((1, 8192), (64, 0)), 32),
    "8k, 8 of 2k, 8 each, 256 own": Work(((1, 8192), (8, 2048), (8, 0)), 256),
    "256 of one 2k, 128 own": Work(((1, 2048), (256, 0)), 128),
    "nothing shared, 64 of 1k": Work(((64, 0),), 1024),
    "nothing shared, 256 of 1k": Work(((256, 0),), 1024),
    "nothing shared, 8 of 1k": Work(((8, 0),), 1024),
}


class Bench:
    """One model's shape and one case: caches, tables, and timings of both ways."""

    def __init__(self, model: str, work: Work) -> None:
        self.heads, self.kv_heads, self.dim = SHAPES[model]
        self.device = torch.device("cuda", torch.cuda.current_device())
        rows, self.kv_lens = work.rows()
        self.members = np.arange(len(self.kv_lens), dtype=np.int32)
        slots = int(rows.slots.max()) + 1
        size = 4 * slots * self.kv_heads * self.dim
        copies = min(28, max(2, -(-BEYOND_CACHE // size)))
        self.caches = [
            torch.randn(2, slots, self.kv_heads, self.dim, dtype=BF16, device=self.device)
            for _ in range(copies)
        ]
        i32 = {"dtype": torch.int32, "device": self.device}
        count = len(self.members)
        table = torch.from_numpy(rows.slots).to(self.device)
        lens = torch.from_numpy(self.kv_lens).to(self.device)
        self.meta = AttentionMeta(
            table, torch.arange(count, **i32), torch.arange(count + 1, **i32), lens, 1,
            table.shape[1], count,
        )  # fmt: skip
        self.q = torch.randn(count, self.heads, self.dim, dtype=BF16, device=self.device)
        self.plan = SegmentFinder(rows, SharingCost(step=1)).find(self.members, self.kv_lens)

    def plain(self) -> float:
        def run() -> None:
            for k, v in self.caches:
                decode(self.q, k, v, self.meta, self.dim**-0.5, pdl=True)

        return graph_seconds(run, self.device) / len(self.caches)

    def tree(
        self, tile: tuple[int, int, int, int] | None = None, pieces: float = 1.0
    ) -> tuple[float, float, float]:
        """(seconds, floor in seconds, relative distance from plain attention)."""
        plan, count = self.plan, len(self.members)
        shape = shape_for(self.heads, self.kv_heads, self.dim, BF16, count, self.device, tile)
        if pieces != 1:
            shape = list_shape(
                self.heads, self.kv_heads, shape.block_rows, shape.block_keys, count,
                int(shape.processors * pieces),
            )  # fmt: skip
        empty = np.empty(0, np.int32)
        made = make_list(
            self.members, self.kv_lens,
            *((plan.starts, plan.ends, plan.reader_starts, plan.readers, plan.tails) if plan
              else (empty, empty, np.zeros(1, np.int32), empty, np.zeros(count, np.int32))),
            shape,
        )  # fmt: skip
        if made is None:
            raise ValueError("the list is larger than its buffers")
        work = work_for(shape, self.dim, self.device)
        work.fill(made)
        table, lens = self.meta.table, self.meta.kv_lens

        def one(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return tree_decode(self.q, k, v, table, lens, work, self.dim**-0.5, tile=tile, pdl=True)

        def run() -> None:
            for k, v in self.caches:
                one(k, v)

        got = one(*self.caches[0]).double()
        want = decode(self.q, *self.caches[0], self.meta, self.dim**-0.5).double()
        moved, operations = cost(made, self.kv_lens, self.heads, self.kv_heads, self.dim, 2, 2)
        floor = max(moved / BANDWIDTH, operations / PRODUCTS)
        seconds = graph_seconds(run, self.device) / len(self.caches)
        return seconds, floor, float((got - want).norm() / want.norm())


def line(name: str, seconds: float, more: str = "") -> None:
    print(f"{name:60} {seconds * 1e6:9.2f} us {more}", flush=True)


def measure(model: str, name: str, work: Work, sweep: bool, rows: list[dict[str, Any]]) -> None:
    bench = Bench(model, work)
    plain = bench.plain()
    line(f"{model}: {name}, plain", plain)
    ways: list[tuple[Any, float]] = [(None, 1.0)]
    if sweep and bench.plan is not None:
        ways += [(tile, 1.0) for tile in TILES if tile != shared_tile(bench.dim, BF16)]
        ways += [(None, pieces) for pieces in LISTS]
    for tile, pieces in ways:
        try:
            seconds, floor, distance = bench.tree(tile, pieces)
        except Exception as error:
            # One way to cut the work that does not fit must not end the run.
            print(f"  tile {tile}, pieces {pieces}: {type(error).__name__}: {str(error)[:120]}")
            continue
        what = "tree" if (tile, pieces) == (None, 1.0) else f"tile {tile}, {pieces} x pieces"
        line(
            f"  {what}", seconds,
            f"{plain / seconds:5.2f} x, floor {floor * 1e6:.2f} us ({floor / seconds:.0%}), "
            f"off by {distance:.1e}",
        )  # fmt: skip
        rows.append(
            {"model": model, "case": name, "way": what, "plain": plain, "tree": seconds,
             "floor": floor, "distance": distance}
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--model", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", type=Path, help="write the rows as JSON here")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for model in options.model:
        for name in options.only:
            measure(model, name, CASES[name], options.sweep, rows)
            torch.cuda.empty_cache()
        for tokens in (64, 128, 256, 512, 1024) if options.sweep else ():
            for count in (8, 64):
                work = Work(((1, tokens), (count, 0)), 256)
                measure(model, f"{count} of {tokens}, 256 own", work, False, rows)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        options.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
