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
from .mid_batch import LARGEST_WIDTH, Tiles, mid_gate_up, mid_linear, mid_linear_add
from .norm import rms_norm
from .operands import Norm
from .small_batch import (
    MOST_ROWS,
    Plan,
    default_plan,
    linear_add,
    norm_gate_up,
    norm_linear,
    small_linear,
)

ROW_BUCKETS = (1, 8, MOST_ROWS, 32, 64, 128, 256)
"""Row counts for which plans are kept; others go by the next larger one."""

AT_START = (1, 8, MOST_ROWS)
"""Those measured by an engine when no table has them; the others take minutes."""

FORMAT = 2
"""Of a table's file; what another format says is measured again."""

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
    """The row count that was measured for `rows`, which is at most the largest bucket."""
    return next(size for size in ROW_BUCKETS if size >= rows)


def candidates(product: Product) -> list[Plan | Tiles]:
    """Plans worth measuring: few, since each is compiled first."""
    rows, _, k, gated, normed = product
    if rows == 1:
        plans = [
            Plan(4, 512, 4, 0),
            Plan(8, 512, 4, 0),
            Plan(8, 1024, 8, 0),
            Plan(4, 1024, 4, 0, before=2),
            Plan(4, 512, 2, 0, before=3),
            Plan(4, 2048, 8, 0, before=2),
            Plan(2, 2048, 8, 0, before=2),
            Plan(8, 512, 8, 0, before=3),
        ]
        if gated:
            # A norm taken by every program costs more than its own kernel where x is wide.
            plans += [Plan(4, 512, 4, 0, inside=0), Plan(2, 2048, 4, 0, inside=0)]
        elif k > 4096:
            plans += [Plan(4, 2048, 8, 0, before=4)]
        return [plan for plan in plans if plan.block_k * plan.before < 2 * k]
    if rows > MOST_ROWS:
        return list(tile_candidates(product))
    plans = [
        Plan(16, 64, 4, 4, slices=4),
        Plan(16, 64, 8, 3, slices=8),
        Plan(16, 128, 4, 3, slices=4),
        Plan(32, 64, 4, 4, slices=4),
    ]
    if gated:
        plans = [*plans[:2], Plan(16, 32, 4, 5, slices=4), Plan(32, 64, 8, 3, slices=4)]
    if gated or normed:
        plans += [plan._replace(inside=0) for plan in plans[:2]]
    return [*plans, *tile_candidates(product)]


def tile_candidates(product: Product) -> list[Tiles]:
    """Cuts for the tensor cores: enough programs for the device, each with enough in flight."""
    rows, n, k, gated, _ = product
    shapes = [(64, 128, 4, 4), (64, 256, 4, 3), (128, 64, 8, 4), (128, 128, 8, 3)]
    if rows > 32:
        shapes = [(64, 64, 4, 4 if rows > 64 else 6), *shapes[::2]]
    if rows > 128:
        shapes = [(64, 64, 4, 4), (128, 64, 8, 3), (128, 64, 8, 4)]
    programs = n * (2 if gated else 1) // 64
    slices = [1]
    if not gated and n <= LARGEST_WIDTH:
        # About one, two and three programs a multiprocessor.
        wanted = [max(1, round(132 * many / programs)) for many in (1, 2, 3)]
        slices = sorted({min(s, 16, max(1, k // 256)) for s in wanted})
    return [
        Tiles(block_n, block_k, warps, stages, s)
        for block_n, block_k, warps, stages in shapes
        for s in slices
    ]


class Table:
    """The best plan of each product; None stands for the vendor's library."""

    def __init__(self, plans: dict[str, Plan | Tiles | None], path: Path | None = None) -> None:
        self.plans = plans
        self.path = path

    @staticmethod
    def read(path: Path) -> dict[str, Plan | Tiles | None]:
        """The plans of a file, none if it is of another format. Raises ValueError, naming the file,
        when it is not such a table."""
        try:
            body = json.loads(path.read_text())
            if body.get("format") != FORMAT:
                return {}
            entries = body["plans"]
            return {key: None if one is None else _plan_of(*one) for key, one in entries.items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is not a table of kernel plans: {error!r}") from error

    def plan(self, product: Product, dtype: torch.dtype) -> Plan | Tiles | None:
        """How to compute a product of few rows; None: by the vendor's library."""
        if dtype == torch.float32:
            return default_plan(1, product.n, product.k) if product.rows == 1 else None
        product = product._replace(rows=bucket(product.rows))
        for one in (product, product._replace(normed=False)):
            if one.key in self.plans:
                return self.plans[one.key]
        size = product.n * product.k * 2 * (2 if product.gated else 1)
        if product.rows > MOST_ROWS or (product.rows > 1 and size > LARGEST_UNMEASURED):
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


def _plan_of(kind: str, *numbers: int) -> Plan | Tiles:
    return {"rows": Plan, "tiles": Tiles}[kind](*map(int, numbers))


def write(path: Path, plans: dict[str, Plan | Tiles | None]) -> None:
    """Replace a table's file as a whole, so that another process never reads half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    body = {
        key: None if one is None else ["tiles" if isinstance(one, Tiles) else "rows", *one]
        for key, one in sorted(plans.items())
    }
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(one)}" for key, one in body.items())
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, text=True)
    with os.fdopen(handle, "w") as file:
        file.write(f'{{"format": {FORMAT}, "plans": {{\n{lines}\n}}}}\n')
    Path(name).replace(path)


class Trial:
    """The tensors of one product, with weights enough that no cache holds them, and its ways."""

    def __init__(self, product: Product, device: torch.device) -> None:
        rows, n, k, gated, normed = product
        self.product = product
        self.size = n * k * 2 * (2 if gated else 1)
        self.weights = [
            torch.randn(n * (2 if gated else 1), k, dtype=torch.bfloat16, device=device)
            for _ in range(max(1, -(-ROTATED // self.size)))
        ]
        self.x = torch.randn(rows, k, dtype=torch.bfloat16, device=device)
        self.before = torch.ones(k, dtype=torch.bfloat16, device=device)
        self.after = Norm(torch.ones(n, dtype=torch.bfloat16, device=device), 1e-6)
        self.out = torch.zeros(rows, n, dtype=torch.bfloat16, device=device)
        # What goes back to the residual is normed next, which some ways do for nothing.
        self.added = not (gated or normed) and n <= LARGEST_WIDTH

    def run(self, plan: Plan | Tiles | None) -> None:
        """The product with every weight, and what a plan leaves to other kernels."""
        for weight in self.weights:
            if self.added:
                self._add(plan, weight)
            elif isinstance(plan, Plan):
                self._small(plan, weight)
            else:
                self._large(plan, weight)

    def _small(self, plan: Plan, weight: torch.Tensor) -> None:
        if self.product.gated:
            norm_gate_up(
                self.x, self.before, 1e-6, weight, "silu", out=self.out, plan=plan, pdl=True
            )
        elif self.product.normed:
            norm_linear(self.x, self.before, 1e-6, weight, out=self.out, plan=plan, pdl=True)
        else:
            small_linear(self.x, weight, out=self.out, plan=plan, pdl=True)

    def _large(self, plan: Tiles | None, weight: torch.Tensor) -> None:
        x = self.x
        if self.product.gated or self.product.normed:
            x = rms_norm(x, self.before, 1e-6, pdl=True)
        if plan is None:
            y = F.linear(x, weight)
            if self.product.gated:
                gate(y, "silu", out=self.out, pdl=True)
        elif self.product.gated:
            mid_gate_up(x, weight, "silu", tiles=plan, out=self.out, pdl=True)
        else:
            mid_linear(x, weight, tiles=plan, out=self.out, pdl=True)

    def _add(self, plan: Plan | Tiles | None, weight: torch.Tensor) -> None:
        normed = None
        if plan is None:
            self.out.addmm_(self.x, weight.t())
        elif isinstance(plan, Tiles):
            normed = mid_linear_add(self.x, weight, self.out, tiles=plan, norm=self.after, pdl=True)
        else:
            linear_add(self.x, weight, self.out, plan=plan, pdl=True)
        # Up to 16 rows the next kernel may take the norm itself.
        if normed is None and self.product.rows > MOST_ROWS:
            rms_norm(self.out, self.after.weight, self.after.eps, pdl=True)


def best_plan(product: Product, device: torch.device) -> tuple[Plan | Tiles | None, str]:
    """The fastest candidate, and a line that says how fast it and the library are."""
    trial = Trial(product, device)
    times: dict[Plan | Tiles | None, float] = {}
    for plan in (None, *candidates(product)):
        # A plan that asks for more than the device has is no candidate there.
        with contextlib.suppress(OutOfResources):
            seconds = graph_seconds(lambda p=plan: trial.run(p), device)
            times[plan] = seconds / len(trial.weights)
    library = times[None]
    plan = min(times, key=lambda one: times[one])
    line = (
        f"{product.key}: {times[plan] * 1e6:.1f} us, {trial.size / times[plan] / 1e12:.2f} TB/s, "
        f"by {'the library' if plan is None else plan}, library {library * 1e6:.1f} us"
    )
    return plan, line


def graph_seconds(work: Callable[[], None], device: torch.device, repeats: int = 10) -> float:
    """Seconds of `work`, captured into a CUDA graph, by the best of three timings."""
    stream = torch.cuda.Stream(device)
    # What the work reads may still be being made.
    stream.wait_stream(torch.cuda.current_stream(device))
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
    plans: dict[str, Plan | Tiles | None] = {}
    shipped = Path(__file__).with_name("tuned") / path.name
    for file in (shipped, path):
        if file.exists():
            plans |= Table.read(file)
    return Table(plans, path)
