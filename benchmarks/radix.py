"""The radix tree and the scheduler alone, with no model: what they cost a prompt, and a step.

python benchmarks/radix.py [--out results.json]

With --simulate, policies and evictions over a trace instead: few-shot, tot or agents (made from
--seed, of --requests), all three (all), or a file: one that --save or `Trace.save` wrote, or one
that an engine recorded (`ramet serve --record-trace FILE`). First one request after the other in
the order of the trace, in a cache of --cache of the working set, against what Belady's choice would
find; then through a queue, in a cache of the whole working set.

Of a recording all is played again before that, in a cache of --slots tokens, and nothing is held
but that cache; the rest is done with its first --requests.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import radix_recorded
from radix_informed import informed
from radix_simulate import PAGE, belady, replay, rows_for, serve
from radix_trace import GENERATORS, Trace
from ramet.runtime.engine.trace_file import is_recorded
from ramet.runtime.memory.eviction import POLICIES as EVICTIONS
from ramet.runtime.memory.kv_memory import KVMemory
from ramet.runtime.protocol.messages import EngineSampling
from ramet.runtime.scheduler.policies import POLICIES
from ramet.runtime.scheduler.request import Request
from ramet.runtime.scheduler.scheduler import Limits, Scheduler
from ramet.runtime.scheduler.segments import SharingCost
from report import Report

VOCABULARY = 49_000
MOST_INFORMED = 50_000
"""Requests of traces for which it is computed what all knowledge but of times would find."""


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


def choosing(report: Report, leaves: int) -> None:
    """What it takes to choose and cut one leaf of so many, a third of which programs keep."""
    for eviction in EVICTIONS:
        memory = KVMemory(leaves * PAGE, eviction=eviction)
        for number in range(leaves):
            tokens = np.arange(number * PAGE, (number + 1) * PAGE, dtype=np.int32)
            slots = memory.allocate(PAGE, 0, -1)
            assert slots is not None
            shared = memory.share(memory.hold(tokens[:0], b"").node, tokens, slots, 0, b"")
            memory.release(shared.node, slots[:0])
            if number % 3 == 0:
                memory.tree.pin(shared.node, ahead=number % 2)
        times = []
        for _ in range(leaves // 2):
            begin = time.perf_counter()
            memory.tree.evict(PAGE)
            times.append((time.perf_counter() - begin) * 1e6)
        note = f"{np.mean(times):.1f} µs on average, with what was put off"
        report.row(f"choosing one of {leaves} leaves, {eviction}", np.median(times), "µs",
                   note=note)  # fmt: skip


def steps(report: Report, rows: int, bar: str, *, looking_ahead: bool = False) -> None:
    """Planning a decode step of ``rows`` requests that share a 500-token prefix.
    ``looking_ahead``: with the policy and the eviction of programs, and tree attention."""
    rng = np.random.default_rng(1)
    way = "program" if looking_ahead else "lru"
    memory = KVMemory(rows * 3000, eviction=way)
    scheduler = Scheduler(
        Limits(max_rows=rows, context_length=4096, step_tokens=4096),
        memory,
        policy="program" if looking_ahead else "fcfs",
        sharing=SharingCost() if looking_ahead else None,
    )
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
    more = ", program, tree attention" if looking_ahead else ""
    work = f"{rows} running{more}"
    report.row(f"scheduler + tree a step, {work}", np.median(times), "µs", bar=bar)
    report.row(f"the same, 99th percentile, {work}", np.percentile(times, 99), "µs")


def evictions(report: Report, name: str, trace: Trace, share: float) -> None:
    """Hit rates with the order of access fixed by the trace."""
    prompts, full = trace.prompt_tokens(), trace.working_set()
    size = max(int(full * share), trace.longest() + PAGE) // PAGE * PAGE
    best = belady(trace, size)
    report.row(f"{name}: unlimited cache", belady(trace, full) / prompts * 100, "% found")
    report.row(f"{name}: Belady, {share:g} of the working set", best / prompts * 100, "% found")
    known = informed(trace, size) if len(trace) <= MOST_INFORMED else 0
    if known:
        report.row(f"{name}: all known but times", known / best * 100, "% of Belady",
                   note=f"{known / prompts:.1%} found")  # fmt: skip
    for eviction in EVICTIONS:
        for compiled in (True, False) if eviction == "program" else (True,):
            bar = {True: "≥ 98", False: "≥ 90"}[compiled] if eviction == "program" else ""
            kind = {True: ", compiled", False: ", lazy"}[compiled] if eviction == "program" else ""
            hits = replay(trace, size, eviction, compiled=compiled)
            note = f"{hits / prompts:.1%} found"
            if known and eviction == "program" and compiled:
                note += f", {hits / known:.1%} of what is found with all known but times"
            report.row(f"{name}: {eviction}{kind}", hits / best * 100, "% of Belady", bar=bar,
                       note=note)  # fmt: skip


def policies(report: Report, name: str, trace: Trace, load: float, ageing: float) -> None:
    """Waiting times and hit rates through a queue."""
    rows, size = rows_for(trace, load), max(trace.working_set(), trace.longest() + PAGE)
    for policy in POLICIES:
        for eviction in EVICTIONS:
            served = serve(trace, size, policy, eviction, rows=rows, ageing=ageing)
            found = served.hits / trace.prompt_tokens()
            median, tail = np.percentile(served.waits, [50, 99])
            usual, slow = np.percentile(served.latencies, [50, 95])
            decision = float(np.median(served.decisions)) * 1e6
            note = (
                f"{found:.1%} found; wait p50 {median:.2f}, p99 {tail:.2f}, "
                f"max {max(served.waits):.2f} s; program p95 {slow:.1f} s; {decision:.0f} µs CPU "
                "a decision"
            )
            report.row(f"{name}: {policy} + {eviction}, {rows} rows", usual, "s program p50",
                       note=note)  # fmt: skip


def recorded(report: Report, path: str, slots: int) -> None:
    """All of a recording, which may be long, in a cache as large as the engine's was."""
    name = Path(path).stem
    for eviction in EVICTIONS:
        counted = radix_recorded.replay(path, eviction, slots)
        share = 100 / max(counted.prompt, 1)
        if eviction == next(iter(EVICTIONS)):
            note = f"{counted.requests} requests, {counted.prompt} prompt tokens"
            note += f"; {counted.lost} more were not recorded" if counted.lost else ""
            report.row(f"{name}: the engine itself", counted.found * share, "% found", note=note)
        note = f"{counted.refused} did not fit" if counted.refused else ""
        work = f"{name}: {eviction}, {counted.slots} tokens"
        report.row(work, counted.again * share, "% found", note=note)


def simulate(report: Report, options: argparse.Namespace) -> None:
    names = [*GENERATORS] if options.simulate == "all" else [options.simulate]
    for name in names:
        if name in GENERATORS:
            trace = GENERATORS[name](options.requests, options.seed)
        elif is_recorded(name):
            recorded(report, name, options.slots)
            trace, name = radix_recorded.beginning(name, options.requests), Path(name).stem
        else:
            trace, name = Trace.load(name), Path(name).stem
        if options.save:
            trace.save(options.save)
        evictions(report, name, trace, options.cache)
        if not options.replay_only:
            policies(report, name, trace, options.load, options.ageing)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", help="write JSON here; of a simulation, Markdown beside it")
    parser.add_argument("--simulate", metavar="TRACE")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=float, default=0.5, help="share of the working set")
    parser.add_argument(
        "--load", type=float, default=1.0, help="how busy the rows of the queue are"
    )
    parser.add_argument("--ageing", type=float, default=5.0, help="seconds")
    parser.add_argument("--replay-only", action="store_true", help="no queue")
    parser.add_argument("--slots", type=int, default=0, help="0: as many as the engine had")
    parser.add_argument("--save", metavar="FILE", help="keep the trace as .npz")
    options = parser.parse_args()
    if options.simulate:
        if options.requests < 1 or options.slots < 0 or options.cache <= 0:
            parser.error("--requests, --cache and --slots must be above 0")
        report = Report("radix-simulated")
        try:
            simulate(report, options)
        except (OSError, ValueError, MemoryError) as error:
            parser.exit(1, f"{error}\n")
        report.write(options.out)
        report.write_table(options.out)
        return
    report = Report("radix")
    match_and_insert(report)
    for leaves in (2_000, 64_000):
        choosing(report, leaves)
    steps(report, 64, "≤ 1000")
    steps(report, 256, "≤ 150")
    steps(report, 256, "≤ 150", looking_ahead=True)
    report.write(options.out)


if __name__ == "__main__":
    main()
