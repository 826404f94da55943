"""The whole engine with tree attention against the same engine without, in turns, on one device.

    python benchmarks/tree_engine_gpu.py [--shape qwen2.5-1.5b] [--only two_levels …] [--out FILE]

Two schedulers, one that shares and one that does not, take turns over one runner, one KV memory and
one set of captured steps; scheduling, messages and sampling are the engine's own, without a
gateway. Random weights, token ids, greedy. A run's order is on, off, off, on, so that a drift of
the clock cancels. ``plan_256`` is the time on the host in which a step of 256 requests is planned,
with the ``program`` policy and eviction.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from ramet.runtime.config import EngineConfig
from ramet.runtime.engine.connections import Connections
from ramet.runtime.engine.loop import Engine
from ramet.runtime.memory.kv_memory import KVMemory
from ramet.runtime.model.build import PAGE, build_runner, device_of, step_tokens_of
from ramet.runtime.model.store import resolve
from ramet.runtime.protocol.codec import engine_codec, reply_codec
from ramet.runtime.protocol.messages import Credit, EngineSampling, StepOut, Submit
from ramet.runtime.scheduler.limits import Limits
from ramet.runtime.scheduler.scheduler import Scheduler
from ramet.runtime.scheduler.segments import SharingCost

CONFIGS = Path(__file__).parent / "configs"
SHAPES = ("qwen2.5-1.5b", "llama-3.1-8b")
CONTEXT, ROWS = 12_288, 256
PATIENCE = 5.0
"""Seconds within which a first step is begun, or something is wrong."""
TURNS = (True, False, False, True)
"""Whether tree attention is on."""


@dataclass(frozen=True)
class Work:
    """``levels``: (branches of each branch above, tokens of each), all cached before; then ``own``
    tokens of each leaf, which are not cached, and ``new`` that it generates. ``timed``: what is
    compared: all ("run") or single decode steps ("step")."""

    levels: tuple[tuple[int, int], ...]
    own: int
    new: int
    turns: int
    timed: str
    bar: str = ""


WORK = {
    "branches": Work(((1, 8000), (64, 0)), 32, 256, 1, "run"),
    "two_levels": Work(((1, 8192), (8, 2048), (8, 0)), 32, 256, 1, "run", "≥ 2"),
    "nothing_shared_1k": Work(((64, 1024),), 1, 96, 3, "step", "≥ 0.99"),
    "nothing_shared_8k": Work(((64, 8192),), 1, 48, 2, "step", "≥ 0.99"),
    "plan_256": Work(((1, 512), (256, 0)), 60, 200, 1, "plan"),
}


class TimedScheduler(Scheduler):
    """Notes when decode steps were planned, and how long that took."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.steps: list[tuple[int, float, float]] = []
        """(requests that decode, when its planning began, how long it took)"""

    def plan(self, *, drained: bool = True):  # type: ignore[no-untyped-def]
        begin = time.perf_counter()
        planned = super().plan(drained=drained)
        took = time.perf_counter() - begin
        if planned is not None and planned.batch.num_decodes == len(planned.batch.rows):
            self.steps.append((planned.batch.num_decodes, begin, took))
        return planned


@dataclass
class Took:
    """Of one run: all of it, one decode step of all requests, planning one (median; seconds)."""

    run: float
    step: float
    plan: float


class Side:
    """An engine over a runner and a memory that it shares with another, and its one client."""

    def __init__(
        self, runner: Any, memory: KVMemory, limits: Limits, sharing: SharingCost | None, at: str
    ) -> None:
        self.scheduler = TimedScheduler(limits, memory, policy="program", sharing=sharing)
        address = f"ipc://{at}"
        self.engine = Engine(runner, self.scheduler, Connections(address, memory.tree), [])
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)
        self._send(Credit(steps=1 << 40))
        self._rid = 0

    def _send(self, message: Any) -> None:
        self._socket.send(engine_codec.encode(message))

    def run(self, prompts: Sequence[np.ndarray], new: int) -> Took:
        """All prompts together, each to its full length."""
        sampling = EngineSampling(max_new_tokens=new)
        self.scheduler.steps.clear()
        begin = time.perf_counter()
        for prompt in prompts:
            self._rid += 1
            self._send(Submit(rid=self._rid, ids=prompt.tobytes(), sampling=sampling))
        ended = tokens = 0
        before, took = self.engine.steps, 0.0
        while ended < len(prompts):
            self.engine.step()
            took = time.perf_counter() - begin
            # Nobody listens before the first step, or while anything runs: that would be timed.
            if self.scheduler.idle and (self.engine.steps > before or took > PATIENCE):
                more, sampled = self._heard()
                ended, tokens = ended + more, tokens + sampled
        self.engine.step()  # one launched before the last samples were known may be under way
        if tokens != len(prompts) * new:
            raise RuntimeError(f"{tokens} tokens instead of {len(prompts) * new}")
        full = [(at, plan) for count, at, plan in self.scheduler.steps if count == len(prompts)]
        starts = [at for at, _ in full]
        step = (starts[-1] - starts[0]) / (len(starts) - 1) if len(starts) > 1 else 0.0
        return Took(took, step, float(np.median([plan for _, plan in full])) if full else 0.0)

    def _heard(self) -> tuple[int, int]:
        """How many requests have ended, and how many tokens came. Raises what one failed of."""
        ended = tokens = 0
        while self._socket.poll(50):
            reply = reply_codec.decode(self._socket.recv())
            if isinstance(reply, StepOut):
                tokens += len(reply.tokens) // 4
                for finish in reply.finished:
                    ended += 1
                    if finish.error is not None:
                        raise RuntimeError(f"a request failed: {finish.error.message}")
        return ended, tokens

    def close(self) -> None:
        self._socket.close()
        self._context.term()
        self.engine.connections.close()


class Bench:
    """One shape on one device, both sides of it."""

    def __init__(self, model: Path, settings: dict[str, Any], folder: str, divide: int = 1) -> None:
        begin = time.perf_counter()
        config = EngineConfig.from_settings(
            {
                "model_path": str(model),
                "load_format": "dummy",
                "dtype": "bfloat16",
                "context_length": CONTEXT // divide,
                "mem_fraction_static": 0.85,
                "max_running_requests": ROWS,
                "random_seed": 0,
                "radix_eviction_policy": "program",
                **settings,
            }
        )
        self.runner = build_runner(config, resolve(str(model)), lambda what: print(" ", what))
        self.memory = KVMemory(
            self.runner.num_slots - PAGE, PAGE, eviction=config.radix_eviction_policy
        )
        limits = Limits(
            max_rows=self.runner.max_rows,
            context_length=self.runner.context_length,
            step_tokens=step_tokens_of(config, device_of(config), self.runner.context_length),
            prompt_sizes=self.runner.prompt_sizes,
        )
        cost = self.runner.sharing or SharingCost()
        self.sides = {
            on: Side(self.runner, self.memory, limits, cost if on else None, f"{folder}/{on}")
            for on in (True, False)
        }
        self.started = time.perf_counter() - begin
        self._divide = divide
        self._rng = np.random.default_rng(0)

    def _ids(self, count: int) -> np.ndarray:
        high = min(100_000, self.runner.vocab_size)
        return self._rng.integers(high // 100, high, count).astype(np.int32)

    def _stems(self, levels: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        stems = [np.empty(0, np.int32)]
        for branches, tokens in levels:
            own = [[self._ids(tokens // self._divide) for _ in range(branches)] for _ in stems]
            stems = [np.concatenate((s, o)) for s, ends in zip(stems, own) for o in ends]
        return stems

    def measure(self, work: Work) -> dict[bool, list[Took]]:
        """What each turn of each side took; what is to be cached is, before."""
        stems = self._stems(work.levels)
        # The first alone: the others wait for what they have in common with it.
        self.sides[False].run([stem for stem in stems[:: _repeated(work.levels)] if len(stem)], 1)
        took: dict[bool, list[Took]] = {True: [], False: []}
        new = max(2, work.new // self._divide)
        for on in TURNS * work.turns:
            prompts = [np.concatenate((stem, self._ids(work.own))) for stem in stems]
            took[on].append(self.sides[on].run(prompts, new))
        for side in self.sides.values():
            side.scheduler.assert_consistent()
        self.memory.flush()
        return took

    def close(self) -> None:
        for side in self.sides.values():
            side.close()
        self.runner.close()


def _repeated(levels: Sequence[tuple[int, int]]) -> int:
    """How many leaves in turn have the same text."""
    return levels[-1][0] if len(levels) > 1 and not levels[-1][1] else 1


def rows_of(name: str, work: Work, took: dict[bool, list[Took]]) -> Iterator[dict[str, Any]]:
    """Medians of both sides and their ratio; times in milliseconds, planning in microseconds."""
    for what, scale, unit in (("run", 1e3, "ms"), ("step", 1e3, "ms"), ("plan", 1e6, "µs")):
        on, off = ([getattr(one, what) * scale for one in took[side]] for side in (True, False))
        row: dict[str, Any] = {"work": name, "what": what, "unit": unit}
        row |= {"on": float(np.median(on)), "off": float(np.median(off))}
        row["off_over_on"] = row["off"] / row["on"] if row["on"] else None
        row |= {"all_on": on, "all_off": off}
        row["bar"] = work.bar if what == work.timed else ""
        if what == "plan" and work.timed == "plan":
            row["bar"] = "on ≤ 150"
        yield row


def show(row: dict[str, Any]) -> None:
    ratio = f"{row['off_over_on']:.3f} ×" if row["off_over_on"] else "–"
    spread = " ".join(f"{value:.4g}" for value in row["all_on"])
    other = " ".join(f"{value:.4g}" for value in row["all_off"])
    print(
        f"{row['work']:18} {row['what']:5} on {row['on']:9.4g} off {row['off']:9.4g} "
        f"{row['unit']:3} {ratio:9} {row['bar'] and 'bar ' + row['bar']:14} "
        f"[{spread} | {other}]",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", action="append", help=f"default: {', '.join(SHAPES)}")
    parser.add_argument("--only", nargs="+", choices=WORK, default=list(WORK))
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--divide", type=int, default=1, help="all lengths by so much, for a try")
    parser.add_argument("--setting", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--out", type=Path, help="write JSON here")
    options = parser.parse_args()
    settings = {"device": options.device}
    for item in options.setting:
        name, _, value = item.partition("=")
        settings[name] = json.loads(value)
    import torch

    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", *sys.argv]),
        "rows": [],
    }
    for shape in options.shape or SHAPES:
        path = CONFIGS / f"{shape}.json"
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(path if path.exists() else Path(shape), settings, folder, options.divide)
            print(f"{shape}: started in {bench.started:.1f} s", flush=True)
            try:
                # What a kernel's first call costs is no one's time.
                bench.measure(Work(((1, 256), (64, 0)), 16, 8, 1, "run"))
                for name in options.only:
                    for row in rows_of(name, WORK[name], bench.measure(WORK[name])):
                        result["rows"].append({"shape": shape, **row})
                        show(row)
                    if options.out:
                        options.out.parent.mkdir(parents=True, exist_ok=True)
                        options.out.write_text(json.dumps(result, indent=1, ensure_ascii=False))
            finally:
                bench.close()
            del bench
            gc.collect()  # the next shape needs the memory
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
