"""What constraints cost a decode step on a GPU, where every row of a large batch is constrained.

    python benchmarks/structured_gpu.py [--out FILE.json] [--shape qwen2.5-1.5b] [--rows 256]
    [--tokens 128] [--repeat 3] [--tokenizer FILE.tiktoken]

Random weights; a vocabulary as wide as the model's, made up unless a file gives one. Each kind of
constraint takes turns with the same requests unconstrained. A step's time is (time for N + 1 tokens
− time for 1 token) / N, prompts cached and grammars compiled before; the ratio that counts is the
median over the turns of constrained / free. Jump-forward is off, so that both do as many steps.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import ramet
import torch
from report import Report
from vocabularies import from_tiktoken, made_up, write_model

CONFIGS = Path(__file__).parent / "configs"
REGULAR_TOKENS = 151_643
"""Of Qwen2; its vocabulary is padded to 151,936."""
PROMPT = 64
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["alpha", "beta", "gamma"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 100_000},
        "notes": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "kind", "size", "notes"],
    "additionalProperties": False,
}
ENDLESS = {"minItems": 4_000, "maxItems": 8_000}
CONSTRAINTS: dict[str, list[dict[str, Any]]] = {
    # An automaton of few states. It may end anywhere and never must.
    "regex": [{"regex": r"([a-zA-Z ,.';:\-]+¬)+"}],
    # A state a character, which no token tells apart.
    "counted regex": [{"regex": r"[a-z ,.]{20000,}"}],
    "JSON schema": [
        {"json_schema": json.dumps({"type": "array", "items": RECORD, **ENDLESS})},
        {
            "json_schema": json.dumps(
                {"type": "array", "items": {"anyOf": [{"type": "number"}, RECORD]}, **ENDLESS}
            )
        },
    ],
}
CONSTRAINTS["all mixed"] = [one for kind in CONSTRAINTS.values() for one in kind]
CONSTRAINTS["half of the rows"] = [
    one for constraint in CONSTRAINTS["all mixed"] for one in (constraint, {})
]


class Bench:
    """The same prompts again and again, under one kind of constraint or none."""

    def __init__(self, runtime: ramet.Runtime, rows: int, tokens: int) -> None:
        draw = random.Random(0)
        self.runtime = runtime
        self.tokens = tokens
        self.prompts = [[draw.randrange(1000, 100_000) for _ in range(PROMPT)] for _ in range(rows)]

    def seconds(self, constraints: list[dict[str, Any]], temperature: float, count: int) -> float:
        """Seconds until every row has ``count`` tokens more."""
        params = [
            {
                "temperature": temperature,
                "max_new_tokens": count,
                "ignore_eos": True,
                "seed": i,
                "jump_forward": False,
                **constraints[i % len(constraints)],
            }
            for i in range(len(self.prompts))
        ]
        begun = time.perf_counter()
        replies = self.runtime.generate(input_ids=self.prompts, sampling_params=params)
        seconds = time.perf_counter() - begun
        for reply in replies:
            made = len(reply["output_ids"])
            assert made == count, f"{made} tokens instead of {count}: {reply['meta_info']}"
        return seconds

    def step(self, constraints: list[dict[str, Any]], temperature: float) -> tuple[float, float]:
        """(seconds of a step, steps that were taken for each token)"""
        short = self.seconds(constraints, temperature, 1)
        before = self.runtime.server_info()["steps"]
        whole = self.seconds(constraints, temperature, self.tokens + 1)
        taken = self.runtime.server_info()["steps"] - before
        return (whole - short) / self.tokens, taken / (self.tokens + 1)


def compare(
    report: Report, bench: Bench, names: list[str], temperature: float, repeat: int
) -> None:
    """One table's part: each kind against free, in turns."""
    for name in names:
        bench.seconds(CONSTRAINTS[name], temperature, 8)  # compiles
    bench.step([{}], temperature)
    for name in names:
        ratios, free, bound, steps = [], [], [], []
        for _ in range(repeat):
            free.append(bench.step([{}], temperature)[0])
            seconds, taken = bench.step(CONSTRAINTS[name], temperature)
            bound.append(seconds)
            steps.append(taken)
            ratios.append(seconds / free[-1])
        note = (
            f"{statistics.median(bound) * 1e3:.3f} ms against {statistics.median(free) * 1e3:.3f}; "
            f"{statistics.median(steps):.2f} steps a token; {min(ratios):.3f}–{max(ratios):.3f}"
        )
        what = f"{name}, {len(bench.prompts)} rows, temperature {temperature:g}"
        report.row(what, statistics.median(ratios), "×", bar="≤ 1.03", note=note)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", default="qwen2.5-1.5b", help="of configs/, or a config's path")
    parser.add_argument("--tokenizer", type=Path, help="a tiktoken file; the default is made up")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--only", nargs="+", choices=CONSTRAINTS, default=list(CONSTRAINTS))
    parser.add_argument("--out", help="write JSON here")
    parser.add_argument(
        "--setting", action="append", default=[], metavar="NAME=VALUE",
        help="an engine setting, as JSON",
    )  # fmt: skip
    options = parser.parse_args()
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "context_length": 4096,
        "max_running_requests": options.rows,
        "random_seed": 0,
    }
    for item in options.setting:
        name, _, value = item.partition("=")
        settings[name] = json.loads(value)
    config = CONFIGS / f"{options.shape}.json"
    config = config if config.is_file() else Path(options.shape)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    report = Report(f"structured, on {device}")
    with tempfile.TemporaryDirectory() as folder:
        made = from_tiktoken(options.tokenizer) if options.tokenizer else made_up(REGULAR_TOKENS)
        write_model(Path(folder), config, *made)
        with ramet.Runtime(
            folder, on_log=lambda name, line: print(f"  [{name}] {line}", flush=True), **settings
        ) as runtime:
            bench = Bench(runtime, options.rows, options.tokens)
            for temperature in options.temperature:
                compare(report, bench, options.only, temperature, options.repeat)
                report.write(options.out)


if __name__ == "__main__":
    main()
