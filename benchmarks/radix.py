"""The radix tree and the scheduler alone, with no model: what they cost a prompt, and a step.

python benchmarks/radix.py [--out results.json]
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from ramet.runtime.memory.kv_memory import KVMemory
from ramet.runtime.protocol.messages import EngineSampling
from ramet.runtime.scheduler.request import Request
from ramet.runtime.scheduler.scheduler import Limits, Scheduler
from report import Report

VOCABULARY = 49_000


def match_and_insert(report: Report) -> None:
    """A 4,096-token prompt, half of it shared, in a tree of 100,000 tokens."""
    rng = np.random.default_rng(0)
    memory = KVMemory(400_000)
    stem = rng.integers(0, VOCABULARY, 2048).astype(np.int32)
    times = []
    while len(times) < 60:
        prompt = np.concatenate((stem, rng.integers(0, VOCABULARY, 2048).astype(np.int32)))
        begin = time.perf_counter()
        match = memory.hold(prompt[:-1], b"")
        matched = time.perf_counter() - begin
        after = int(match.slots[-1]) if match.length else -1
        fresh = memory.allocate(len(prompt) - match.length, match.length, after)
        assert fresh is not None
        slots = np.concatenate((match.slots, fresh))
        begin = time.perf_counter()
        shared = memory.share(match.node, prompt, slots, match.length, b"")
        inserted = time.perf_counter() - begin
        memory.release(shared.node, fresh[:0])
        if memory.usage().evictable > 100_000:
            times.append((matched + inserted) * 1e6)
    report.row("match + insert of 4,096 tokens", np.median(times), "µs", bar="≤ 150")


def steps(report: Report, rows: int, bar: str) -> None:
    """Planning a decode step of ``rows`` requests that share a 500-token prefix."""
    rng = np.random.default_rng(1)
    memory = KVMemory(rows * 3000)
    scheduler = Scheduler(Limits(max_rows=rows, context_length=4096, step_tokens=4096), memory)
    stem = rng.integers(0, VOCABULARY, 500).astype(np.int32)
    for rid in range(rows):
        tokens = np.concatenate((stem, rng.integers(0, VOCABULARY, 60).astype(np.int32)))
        scheduler.add(Request(rid, b"", EngineSampling(max_new_tokens=2000), tokens, len(tokens)))
    times = []
    while len(times) < 1000:
        begin = time.perf_counter()
        planned = scheduler.plan()
        seconds = time.perf_counter() - begin
        assert planned is not None
        table = scheduler.rows
        table.tokens[planned.rows, table.known[planned.rows]] = 7
        table.known[planned.rows] += 1
        if planned.batch.num_decodes == rows:
            times.append(seconds * 1e6)
    report.row(f"scheduler + tree a step, {rows} running", np.median(times), "µs", bar=bar)
    report.row(f"the same, 99th percentile, {rows} running", np.percentile(times, 99), "µs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    report = Report("radix")
    match_and_insert(report)
    steps(report, 64, "≤ 1000")
    steps(report, 256, "≤ 150")
    report.write(options.out)


if __name__ == "__main__":
    main()
