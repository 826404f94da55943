"""Which kernel, cut how, is the fastest for each linear of a model on this device.

Measured once on the device and kept in a file of the user's cache folder; tables of known devices
are shipped in `tuned/`. Shapes that neither holds get a default that is right and usually good.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from triton.runtime.errors import OutOfResources

from .activation import gate
from .norm import rms_norm
from .small_batch import (
    MOST_ROWS,
    Plan,
    default_plan,
    norm_gate_up,
    norm_linear,
    small_linear,
)

ROW_BUCKETS = (1, 8, MOST_ROWS)
"""Row counts that are measured; others go by the next larger one."""

LARGEST_UNMEASURED = 128 << 20
"""Bytes of weights up to which the kernel for few rows is taken unmeasured."""

ROTATED = 160 << 20
"""Bytes of weights that a measurement goes through, so that no cache holds them."""


class Product(NamedTuple):
    """One linear: [rows, k] times [n, k] transposed. `normed`: of the RMS norm of its input.
    `gated` (then it is normed as well): n outputs from 2 n rows of weight."""

    rows: int
    n: int
    k: int
    gated: bool = False
    normed: bool = False

    @property
    def key(self) -> str:
        kind = " normed, gated" if self.gated else " normed" if self.normed else ""
        return f"{self.rows}x{self.k}->{self.n}{kind}"


def bucket(rows: int) -> int:
    """The row count that was measured for `rows`, which is at most `MOST_ROWS`."""
    return next(size for size in ROW_BUCKETS if size >= rows)


def candidates(product: Product) -> list[Plan]:
    """Plans worth measuring: few, since each is compiled first."""
    rows, _, k, gated, normed = product
    if rows == 1:
        plans = [
            Plan(2, 1024, 4, 0),
            Plan(4, 512, 4, 0),
            Plan(4, 1024, 8, 0),
            Plan(8, 512, 4, 0),
            Plan(8, 1024, 8, 0),
            Plan(4, 2048, 8, 0),
        ]
        if gated:
            plans += [Plan(4, 256, 4, 0), Plan(2, 1024, 8, 0)]
        return [plan for plan in plans if plan.block_k < 2 * k]
    plans = [
        Plan(16, 64, 4, 4, slices=4),
        Plan(16, 64, 8, 3, slices=8),
        Plan(16, 128, 4, 3, slices=4),
        Plan(32, 64, 4, 4, slices=4),
        Plan(64, 64, 4, 5, slices=1),
    ]
    if gated:
        plans = [*plans[:2], Plan(16, 32, 4, 5, slices=4), Plan(32, 64, 8, 3, slices=4), plans[4]]
    if gated or normed:
        plans += [plan._replace(inside=0) for plan in plans]
    return plans


class Table:
    """The best plan of each product; None stands for the vendor's library."""

    def __init__(self, plans: dict[str, Plan | None], path: Path | None = None) -> None:
        self.plans = plans
        self.path = path

    @staticmethod
    def read(path: Path) -> dict[str, Plan | None]:
        """The plans of a file. Raises ValueError, naming the file, when it is not such a table."""
        try:
            entries = json.loads(path.read_text())["plans"]
            return {
                key: None if one is None else Plan(*map(int, one)) for key, one in entries.items()
            }
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is not a table of kernel plans: {error!r}") from error

    def plan(self, product: Product, dtype: torch.dtype) -> Plan | None:
        """How to compute a product of 1 to `MOST_ROWS` rows; None: by the vendor's library."""
        if dtype == torch.float32:
            return default_plan(1, product.n, product.k) if product.rows == 1 else None
        product = product._replace(rows=bucket(product.rows))
        for one in (product, product._replace(normed=False)):
            if one.key in self.plans:
                return self.plans[one.key]
        size = product.n * product.k * 2 * (2 if product.gated else 1)
        if product.rows > 1 and size > LARGEST_UNMEASURED:
            return None
        return default_plan(product.rows, product.n, product.k)

    def measure(self, products: Iterable[Product], device: torch.device) -> list[str]:
        """Measure, on an idle CUDA device, those products that the table lacks; write them to
        `path`.

        Returns a line a product, to be shown. Needs free memory of `ROTATED` bytes or twice a
        weight's. Not to be called while a graph is captured.
        """
        lines: list[str] = []
        for product in dict.fromkeys(products):
            if product.key not in self.plans:
                self.plans[product.key], line = best_plan(product, device)
                lines.append(line)
        if lines and self.path is not None:
            write(self.path, self.plans)
        return lines


def write(path: Path, plans: dict[str, Plan | None]) -> None:
    """Replace a table's file as a whole, so that another process never reads half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    body = {"plans": {key: None if one is None else list(one) for key, one in plans.items()}}
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, text=True)
    with os.fdopen(handle, "w") as file:
        json.dump(body, file, indent=1, sort_keys=True)
    Path(name).replace(path)


def best_plan(product: Product, device: torch.device) -> tuple[Plan | None, str]:
    """The fastest candidate, and a line that says how fast it and the library are."""
    rows, n, k, gated, normed = product
    size = n * k * 2 * (2 if gated else 1)
    copies = max(1, -(-ROTATED // size))
    weights = [
        torch.randn(n * (2 if gated else 1), k, dtype=torch.bfloat16, device=device)
        for _ in range(copies)
    ]
    x = torch.randn(rows, k, dtype=torch.bfloat16, device=device)
    norm = torch.ones(k, dtype=torch.bfloat16, device=device)
    out = torch.empty(rows, n, dtype=torch.bfloat16, device=device)

    def run(plan: Plan | None) -> None:
        for weight in weights:
            if plan is None:
                # What the library leaves to other kernels counts as well.
                before = rms_norm(x, norm, 1e-6, pdl=True) if gated or normed else x
                after = F.linear(before, weight)
                if gated:
                    gate(after, "silu", out=out, pdl=True)
            elif gated:
                norm_gate_up(x, norm, 1e-6, weight, "silu", out=out, plan=plan, pdl=True)
            elif normed:
                norm_linear(x, norm, 1e-6, weight, out=out, plan=plan, pdl=True)
            else:
                small_linear(x, weight, out=out, plan=plan, pdl=True)

    times: dict[Plan | None, float] = {}
    for plan in (None, *candidates(product)):
        # A plan that asks for more than the device has is no candidate there.
        with contextlib.suppress(OutOfResources):
            times[plan] = graph_seconds(lambda p=plan: run(p), device) / copies
    library = times[None]
    plan = min(times, key=lambda one: times[one])
    line = (
        f"{product.key}: {times[plan] * 1e6:.1f} us ({size / times[plan] / 1e12:.2f} TB/s) by "
        f"{'the library' if plan is None else tuple(plan)}, library {library * 1e6:.1f} us"
    )
    return plan, line


def graph_seconds(work: Callable[[], None], device: torch.device, repeats: int = 10) -> float:
    """Seconds of `work`, captured into a CUDA graph, by the best of three timings."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        work()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
        graph.replay()
        best = float("inf")
        for _ in range(3):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record(stream)
            for _ in range(repeats):
                graph.replay()
            last.record(stream)
            last.synchronize()
            best = min(best, first.elapsed_time(last) / repeats / 1e3)
    return best


def cache_path(name: str) -> Path:
    """Where measurements of a device of this name are kept: under RAMET_HOME, else
    ~/.cache/ramet."""
    home = Path(os.environ.get("RAMET_HOME") or "~/.cache/ramet").expanduser()
    return home / "kernels" / (re.sub(r"\W+", "-", name).strip("-").lower() + ".json")


@functools.cache
def table_for(device: torch.device) -> Table:
    """The table of a device: what is shipped for its kind, under what was measured on it."""
    if device.type != "cuda":
        return Table({})
    name = torch.cuda.get_device_name(device)
    path = cache_path(name)
    plans: dict[str, Plan | None] = {}
    shipped = Path(__file__).with_name("tuned") / path.name
    for file in (shipped, path):
        if file.exists():
            plans |= Table.read(file)
    return Table(plans, path)
