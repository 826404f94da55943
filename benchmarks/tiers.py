"""KV from host memory and from disk against computing it again, in the engine's own scheduler.

    python benchmarks/tiers.py [--model NAME] [--sizes 64 512 4096] [--device cuda] [--out FILE]

Random weights: no files are needed but a config of `configs/`, or any model's. Each prompt is
computed, evicted, loaded from host memory, and loaded from disk (the system may still have its
files in memory; with --drop it is asked to forget them). Times are from asking to the first token,
so each holds the step that computes the last token. The last rows say what a load costs others: the
median step of running requests while one loads, against none.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from ramet.runtime.config import EngineConfig
from ramet.runtime.memory.kv_memory import KVMemory
from ramet.runtime.memory.tiers import Tiers
from ramet.runtime.model.build import PAGE, build_runner, device_of, step_tokens_of
from ramet.runtime.model.store import resolve
from ramet.runtime.model.tier_build import build_tiers
from ramet.runtime.protocol.messages import EngineSampling
from ramet.runtime.scheduler.limits import Limits
from ramet.runtime.scheduler.request import Request
from ramet.runtime.scheduler.scheduler import Scheduler
from report import Report

CONFIGS = Path(__file__).parent / "configs"
SIZES = (64, 256, 1024, 4096)
OTHERS, THEIR_TOKENS = 8, 32
"""Requests that decode while another loads, and how many tokens each."""
TURNS = 3


class Bench:
    """One model, its memory and its tiers, without processes and sockets."""

    def __init__(self, model: Path, folder: str, settings: dict[str, Any], longest: int) -> None:
        config = EngineConfig.from_settings(
            {
                "model_path": str(model),
                "load_format": "dummy",
                "random_seed": 0,
                "max_running_requests": 2 * OTHERS,
                "disk_cache_dir": folder,
                **settings,
            }
        )
        files = resolve(str(model))
        self.runner = build_runner(config, files, lambda what: print(" ", what))
        tiers = build_tiers(config, files, self.runner.kv, lambda what: print(" ", what))
        assert tiers is not None and tiers.disk is not None
        self.tiers: Tiers = tiers
        self.memory = KVMemory(self.runner.num_slots - PAGE, PAGE, tiers=tiers)
        if longest + 64 > min(self.memory.total, self.runner.context_length):
            raise SystemExit(f"a prompt of {longest} tokens does not fit: lower --sizes")
        limits = Limits(
            max_rows=self.runner.max_rows,
            context_length=self.runner.context_length,
            step_tokens=step_tokens_of(config, device_of(config), self.runner.context_length),
            prompt_sizes=self.runner.prompt_sizes,
        )
        self.scheduler = Scheduler(limits, self.memory, sharing=self.runner.sharing)
        self.rng = np.random.default_rng(0)
        self.steps: list[float] = []
        self._rid = 0
        self._flights: list[tuple[Any, Any]] = []
        tiers.costs.pays = lambda *_: True  # type: ignore[method-assign]

    def ids(self, size: int) -> np.ndarray:
        return self.rng.integers(10, self.runner.vocab_size, size).astype(np.int32)

    def add(self, tokens: np.ndarray, new: int) -> Request:
        self._rid += 1
        sampling = EngineSampling(max_new_tokens=new)
        request = Request(self._rid, b"", sampling, tokens, len(tokens))
        self.scheduler.add(request)
        return request

    def step(self) -> None:
        began = time.perf_counter()
        planned = self.scheduler.plan(drained=not self._flights)
        if planned is not None:
            self._flights.append((planned, self.runner.launch(planned.batch)))
        deep = len(self._flights) > int(self.runner.asynchronous)
        if self._flights and (planned is None or deep):
            landed, ticket = self._flights.pop(0)
            result = ticket.result()
            seconds = time.perf_counter() - began
            self.scheduler.loading.computed(landed.batch, seconds)
            if landed.batch.num_decodes == len(landed.batch.rows):
                self.steps.append(seconds)
            self._enter(landed, result)

    def _enter(self, landed: Any, result: Any) -> None:
        rows = self.scheduler.rows
        for row, epoch, token in zip(landed.rows, landed.epochs, result.tokens):
            if rows.epoch[row] != epoch:
                continue
            rows.tokens[row, rows.known[row]] = token
            rows.known[row] += 1
            request = rows.requests[row]
            assert request is not None
            if rows.known[row] - request.prompt_len >= rows.max_new[row]:
                self.scheduler.remove(request)

    def run(self) -> None:
        while not self.scheduler.idle or self._flights:
            self.step()

    def ask(self, tokens: np.ndarray) -> tuple[float, int]:
        """Seconds until the first token, and how many tokens were cached."""
        began = time.perf_counter()
        request = self.add(tokens, 1)
        self.run()
        return time.perf_counter() - began, request.cached_tokens

    def evict(self) -> None:
        """All that the tree holds, into host memory and on to the disk."""
        spilling = self.memory.spilling
        assert spilling is not None
        spilling.evict(self.memory.tree.num_evictable)
        while self.tiers.busy or any(self.tiers.store(name) for name in list(self.tiers.host)):
            self.tiers.poll()
            time.sleep(0.001)

    def forget(self, drop: bool) -> None:
        """Leave it to the disk."""
        self.evict()
        self.tiers.host.clear()
        if drop:
            for path in self.tiers.disk.files.folder.rglob("*.kv"):  # type: ignore[union-attr]
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def measure(self, size: int, drop: bool) -> dict[str, float]:
        """Medians: seconds to compute, to load from host memory, and from disk."""
        took: dict[str, list[float]] = {"compute": [], "host": [], "disk": []}
        for _ in range(TURNS):
            tokens = self.ids(size)
            for way in took:
                seconds, cached = self.ask(tokens)
                expected = 0 if way == "compute" else size - 1
                assert cached == expected, f"{way}: {cached} tokens cached, not {expected}"
                took[way].append(seconds)
                self.evict() if way == "compute" else self.forget(drop)
            self.memory.flush()
        return {way: float(np.median(seconds)) for way, seconds in took.items()}

    def beside(self, size: int) -> tuple[float, float]:
        """The median decode step of others, with nothing else and while one loads."""
        tokens = self.ids(size)
        self.ask(tokens)
        found: list[float] = []
        for loads in (False, True):
            self.evict()
            for _ in range(OTHERS):
                self.add(self.ids(16), THEIR_TOKENS)
            while self.scheduler.waiting:
                self.step()
            self.steps.clear()
            if loads:
                self.add(tokens, 1)
            self.run()
            found.append(float(np.median(self.steps)))
        self.memory.flush()
        return found[0], found[1]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="of configs/, or any config.json")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--host-gb", type=float, default=4.0)
    parser.add_argument("--slots", type=int, default=16384)
    parser.add_argument("--drop", action="store_true", help="ask the system to forget the files")
    parser.add_argument("--folder", help="where the disk tier is (default: a temporary one)")
    parser.add_argument("--out")
    options = parser.parse_args()
    path = CONFIGS / f"{options.model}.json"
    settings = {
        "device": options.device,
        "dtype": options.dtype,
        "max_total_tokens": options.slots,
        "host_cache_gb": options.host_gb,
    }
    report = Report("tiers")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        model = path if path.exists() else Path(options.model)
        bench = Bench(model, folder, settings, max(options.sizes))
        bench.measure(min(options.sizes), False)  # first calls are no one's time
        for size in options.sizes:
            took = bench.measure(size, options.drop)
            size_mib = size // 16 * bench.tiers.block_bytes / 2**20
            report.row(f"{size} tokens: computed", took["compute"] * 1e3, "ms")
            for way in ("host", "disk"):
                ratio = took["compute"] / took[way]
                note = f"{ratio:.2f} x as fast; {size_mib:.1f} MiB"
                report.row(f"{size} tokens: from {way}", took[way] * 1e3, "ms", note=note)
        for name, rate in bench.tiers.costs.facts().items():
            unit = "token/s" if "token" in name else "GB/s"
            report.row(f"estimate: {name}", rate if "token" in name else rate / 1e9, unit)
        alone, beside = bench.beside(max(options.sizes))
        report.row(f"decode step of {OTHERS}, alone", alone * 1e3, "ms")
        note = f"{beside / alone:.2f} x"
        report.row(f"decode step of {OTHERS}, while one loads", beside * 1e3, "ms", note=note)
        bench.tiers.close()
        bench.runner.close()
    report.write(options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
