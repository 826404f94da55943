"""Programs sent whole against the same calls sent one by one: trees of thought, many at a time.

    python benchmarks/programs_gpu.py --out results.json [--shape qwen2.5-1.5b] [--pool roomy] …

A program writes its problem behind a long beginning that all programs share. At each of three
stages every thought that is still followed is continued in three ways, each way is rated, and the
first three are followed further; then the first is answered. ``--concurrent`` programs run at any
time, until ``--programs`` are done. Weights are random and every answer has its full length, so
that all ways do the same work:

- "calls, lpm": a client sends each generation by itself, with all of its prompt's token ids (those
  that came back among them, so that the cache finds all of it), as soon as what it needs is there.
- "whole, lpm": the same engine and the same policy; each program is sent compiled, in one message.
- "whole, program": as before, with the policy and the eviction that look at programs.

The pool is roomy, or tight: half of what the programs that run at a time hold at their ends.
So many programs wait longer than the default bound, behind which every policy is first come,
first served; hence ``schedule_ageing`` is 60 s here, in all ways. Seconds are those of the second
of two equal turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import ramet as rt
from report import Report

CONFIGS = Path(__file__).parent / "configs"
STAGES, WAYS, FOLLOWED = 3, 3, 3
CALLS = 1 + 2 * sum(WAYS * min(FOLLOWED, WAYS**stage) for stage in range(STAGES))
"""Generations of a program: a thought and its rating for each way, and the answer."""
MODES = {
    "calls, lpm": {"schedule_policy": "lpm", "radix_eviction_policy": "lru"},
    "whole, lpm": {"schedule_policy": "lpm", "radix_eviction_policy": "lru"},
    "whole, program": {"schedule_policy": "program", "radix_eviction_policy": "program"},
}
BARS = {"programs/s": "≥ 1.3", "p95 latency": "≥ 1.5"}


@dataclass(frozen=True)
class Sizes:
    """Tokens: one a character in the prompts (a model without files reads bytes)."""

    shared: int
    own: int
    thought: int
    rating: int

    def beginning(self) -> str:
        text = "".join(f"Example {i}: take {i} steps, then look at what is left.\n" for i in
                       range(self.shared // 40 + 1))  # fmt: skip
        return text[: self.shared]

    def problem(self, number: int) -> str:
        words = "".join(f" {number * 7919 + i * 104729:x}" for i in range(self.own // 4 + 1))
        return f"Problem {number}:{words}"[: self.own]

    @property
    def tokens(self) -> int:
        """Of a program's own KV when it has ended."""
        headings = len("\nWay 0:") + len("\nRating:")
        way = headings + self.thought + self.rating
        return self.own + (CALLS - 1) // 2 * way + 8 + self.thought


def program(sizes: Sizes) -> rt.Function:
    """The tree of thought as a prompt program."""
    beginning = sizes.beginning()

    def tree(s, problem):
        s += beginning + problem
        followed = [s]
        for _ in range(STAGES):
            grown = []
            for thought in followed:
                for way, branch in enumerate(thought.fork(WAYS)):
                    branch += f"\nWay {way}:" + rt.gen("thought", max_tokens=sizes.thought)
                    branch += "\nRating:" + rt.gen("rating", max_tokens=sizes.rating)
                    grown.append(branch)
            followed = grown[:FOLLOWED]
        followed[0] += "\nAnswer:" + rt.gen("answer", max_tokens=sizes.thought)

    return rt.function(tree)


class Calls:
    """The same work by single calls, each with its whole prompt."""

    def __init__(self, runtime: rt.Runtime, sizes: Sizes) -> None:
        self.runtime = runtime
        self.sizes = sizes
        self.encode = runtime.tokenizer.encode
        self.beginning = self.encode(sizes.beginning())

    async def __call__(self, problem: str) -> None:
        followed = [asyncio.ensure_future(_now(self.beginning + self.encode(problem)))]
        tasks = []
        for _ in range(STAGES):
            grown = [
                asyncio.ensure_future(self._way(thought, way))
                for thought in followed
                for way in range(WAYS)
            ]
            tasks += grown
            followed = grown[:FOLLOWED]
        await self._gen(await followed[0], "\nAnswer:", self.sizes.thought)
        await asyncio.gather(*tasks)

    async def _way(self, thought: asyncio.Future[list[int]], way: int) -> list[int]:
        ids = await self._gen(await thought, f"\nWay {way}:", self.sizes.thought)
        return await self._gen(ids, "\nRating:", self.sizes.rating)

    async def _gen(self, before: list[int], text: str, count: int) -> list[int]:
        ids = before + self.encode(text)
        params = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        reply = await self.runtime.async_generate(input_ids=ids, sampling_params=params)
        assert len(reply["output_ids"]) == count, "an answer was cut"
        return ids + reply["output_ids"]


async def _now(value: list[int]) -> list[int]:
    return value


def whole(runtime: rt.Runtime, sizes: Sizes) -> Callable[[str], Awaitable[None]]:
    """One program, sent compiled."""
    compiled = program(sizes).compile()

    async def run(problem: str) -> None:
        state = await compiled.arun(problem, backend=runtime, temperature=0, ignore_eos=True)
        error = state.error()
        if error is not None:
            raise error

    return run


@dataclass
class Turn:
    """What one turn took: seconds of all, of each program, and the tokens that were computed."""

    seconds: float
    latencies: list[float]
    computed: int
    cpu: dict[str, float]
    """Seconds of CPU time of the client, the gateway and the engine. (An engine that waits for a
    device takes some as well.)"""

    @property
    def rate(self) -> float:
        return len(self.latencies) / self.seconds

    def percentile(self, share: float) -> float:
        return sorted(self.latencies)[
            min(len(self.latencies) - 1, int(share * len(self.latencies)))
        ]


async def turn(
    runtime: rt.Runtime, run: Callable[[str], Awaitable[None]], problems: list[str], at_once: int
) -> Turn:
    """Run all, ``at_once`` at any time."""
    before, used = runtime.server_info()["computed_tokens"], cpu_seconds()
    todo = iter(problems)
    latencies: list[float] = []

    async def worker() -> None:
        for problem in todo:
            begin = time.perf_counter()
            await run(problem)
            latencies.append(time.perf_counter() - begin)

    begin = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(at_once)))
    seconds = time.perf_counter() - begin
    cpu = {name: at_end - used[name] for name, at_end in cpu_seconds().items()}
    return Turn(seconds, latencies, runtime.server_info()["computed_tokens"] - before, cpu)


def cpu_seconds() -> dict[str, float]:
    """CPU time so far of this process, and of the runtime's that it started."""
    seconds = {"client": time.process_time()}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text().split("\0")
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            for name in ("gateway", "engine"):
                if f"ramet.runtime.{name}" in words:
                    ticks = int(fields[11]) + int(fields[12])
                    seconds[name] = ticks / os.sysconf("SC_CLK_TCK")
    return seconds


def measure(
    report: Report, pool: str, mode: str, options: argparse.Namespace, settings: dict
) -> Turn:
    """One mode on an engine of its own."""
    sizes = options.sizes
    path = options.shape if Path(options.shape).exists() else CONFIGS / f"{options.shape}.json"
    with rt.Runtime(
        str(path), on_log=lambda name, line: print(f"  [{name}] {line}", flush=True),
        **{**settings, **MODES[mode]},
    ) as runtime:  # fmt: skip
        run = Calls(runtime, sizes) if mode.startswith("calls") else whole(runtime, sizes)
        result = None
        for number in range(2):
            runtime.flush_cache()
            first = number * options.programs
            problems = [sizes.problem(first + i) for i in range(options.programs)]
            result = asyncio.run(turn(runtime, run, problems, options.concurrent))
        assert result is not None
    name = f"{pool} pool, {mode}"
    report.row(f"{name}: programs", result.rate, "/s")
    report.row(f"{name}: calls", result.rate * CALLS, "/s")
    report.row(f"{name}: latency, median", statistics.median(result.latencies), "s")
    report.row(f"{name}: latency, p95", result.percentile(0.95), "s")
    report.row(f"{name}: latency, most", max(result.latencies), "s")
    report.row(f"{name}: computed a program", result.computed / options.programs, "tokens")
    for process, seconds in result.cpu.items():
        milliseconds = 1000 * seconds / options.programs
        report.row(f"{name}: CPU of the {process} a program", milliseconds, "ms")
    return result


def compare(report: Report, pool: str, turns: dict[str, Turn]) -> None:
    """The ratios that are to be reached."""
    base = turns.get("calls, lpm")
    for mode, result in turns.items():
        if base is None or result is base:
            continue
        bars = BARS if mode == "whole, program" else {}
        what = f"{pool} pool, {mode} against calls: "
        report.row(
            what + "programs/s", result.rate / base.rate, "×", bar=bars.get("programs/s", "")
        )
        report.row(
            what + "p95 latency", base.percentile(0.95) / result.percentile(0.95), "×",
            bar=bars.get("p95 latency", ""),
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", default="qwen2.5-1.5b", help="one of configs/, or a file")
    parser.add_argument("--programs", type=int, default=512)
    parser.add_argument("--concurrent", type=int, default=256)
    parser.add_argument("--shared", type=int, default=1024, help="tokens that all begin with")
    parser.add_argument("--own", type=int, default=256, help="tokens of a problem")
    parser.add_argument("--thought", type=int, default=64)
    parser.add_argument("--rating", type=int, default=4)
    parser.add_argument("--pool", action="append", choices=["roomy", "tight"], help="default: both")
    parser.add_argument("--mode", action="append", choices=list(MODES), help="default: all")
    parser.add_argument("--setting", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    options.sizes = Sizes(options.shared, options.own, options.thought, options.rating)
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    report = Report(f"programs sent whole against single calls, {options.shape}, {device}")
    longest = options.shared + options.own + (STAGES + 1) * (options.thought + 40)
    settings = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "context_length": longest + 256,
        "max_running_requests": 256,
        "schedule_ageing": 60.0,
        "random_seed": 0,
    }
    for item in options.setting:
        name, _, value = item.partition("=")
        settings[name] = json.loads(value)
    own = options.concurrent * options.sizes.tokens
    rooms = {"roomy": options.shared + 2 * own, "tight": options.shared + own // 2}
    for pool in options.pool or rooms:
        turns: dict[str, Turn] = {}
        for mode in options.mode or MODES:
            sized = {**settings, "max_total_tokens": -(-rooms[pool] // 256) * 256}
            turns[mode] = measure(report, pool, mode, options, sized)
            report.write(options.out)
        compare(report, pool, turns)
        report.write(options.out)


if __name__ == "__main__":
    main()
