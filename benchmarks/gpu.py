"""The engine on one GPU against floors and peers: fixed work, random weights, token ids in and out.

    python benchmarks/gpu.py --out results.json [--shape qwen2.5-1.5b] [--only decode_b1] …

Each row is the same work, with the same lengths and seeds, that vLLM 0.26 and SGLang 0.5.17 were
measured with on an H200 (Python API, greedy, answers at full length, one engine at a time).
A decode step's time is (time for N + 1 tokens − time for 1 token) / N with the prefix cached.
For the first shape some rows are measured again with deterministic inference, to show its cost.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from pathlib import Path

CONFIGS = Path(__file__).parent / "configs"
COPY_TBS, MATMUL_TFLOPS = 4.25, 772.0
VOCABULARY = 100_000

# work: (floor, vLLM, SGLang), in the row's own unit; a floor of 0 is not known.
SHAPES: dict[str, dict[str, tuple[float, float, float]]] = {
    "qwen2.5-1.5b": {
        "decode_b1": (0.73, 2.05, 1.99),
        "decode_b8": (0.79, 2.10, 2.12),
        "decode_b64": (1.22, 2.54, 2.71),
        "decode_b256": (2.61, 7.63, 5.16),
        "decode_b64_8k": (4.29, 6.07, 5.59),
        "prefill_8k": (35.3, 52.5, 46.7),
        "first_token_128": (0.8, 11.3, 8.8),
        "offline": (0.0, 19206, 32746),
        "branches_warm": (0.22, 1.35, 1.14),
        "branches_cold": (0.0, 1.39, 1.31),
        "few_shot": (0.13, 0.93, 0.50),
    },
    "llama-3.1-8b": {
        "decode_b1": (3.54, 4.92, 4.71),
        "decode_b8": (3.82, 5.21, 5.17),
        "decode_b64": (5.81, 7.63, 7.64),
        "decode_b256": (12.12, 17.66, 17.32),
        "decode_b64_8k": (19.83, 21.33, 20.50),
        "prefill_8k": (171.0, 215.0, 210.0),
        "first_token_128": (3.7, 12.2, 15.1),
        "offline": (0.0, 10375, 10725),
        "branches_warm": (1.05, 4.26, 3.99),
        "branches_cold": (0.0, 4.30, 4.59),
        "few_shot": (0.0, 1.69, 1.49),
    },
}
UNITS = dict.fromkeys(
    ("decode_b1", "decode_b8", "decode_b64", "decode_b256", "decode_b64_8k"), "ms/step"
) | {"prefill_8k": "ms", "first_token_128": "ms", "offline": "out tok/s"}
DECODES = {
    "decode_b1": (1, 128, 512),
    "decode_b8": (8, 1024, 256),
    "decode_b64": (64, 1024, 256),
    "decode_b256": (256, 1024, 128),
    "decode_b64_8k": (64, 8192, 128),
}


DETERMINISTIC = ("decode_b1", "decode_b64", "prefill_8k")
"""Rows that are measured again with deterministic inference."""


class Bench:
    """One shape on one runtime."""

    def __init__(self, runtime) -> None:
        self.runtime = runtime
        self.rng = random.Random(0)

    def ids(self, count: int) -> list[int]:
        return [self.rng.randrange(1000, VOCABULARY) for _ in range(count)]

    def run(self, prompts: list[list[int]], lengths: list[int]) -> float:
        """Seconds for all prompts, each to its full length."""
        params = [{"temperature": 0.0, "max_new_tokens": n, "ignore_eos": True} for n in lengths]
        begin = time.perf_counter()
        replies = self.runtime.generate(input_ids=prompts, sampling_params=params)
        seconds = time.perf_counter() - begin
        for reply, n in zip(replies, lengths):
            assert len(reply["output_ids"]) == n, "an answer was cut"
        return seconds

    def warm_up(self) -> None:
        self.run([self.ids(64)], [16])
        self.run([self.ids(64) for _ in range(256)], [8] * 256)
        self.run([self.ids(9000)], [2])
        self.runtime.flush_cache()

    def decode(self, batch: int, context: int, count: int) -> float:
        prompts = [self.ids(context) for _ in range(batch)]
        self.run(prompts, [1] * batch)
        short = min(self.run(prompts, [1] * batch) for _ in range(2))
        return (self.run(prompts, [count + 1] * batch) - short) / count * 1e3

    def rows(self, only: list[str]):
        """(name, value) of each row of work, as it is measured."""

        def wanted(name: str) -> bool:
            return not only or name in only

        for name, work in DECODES.items():
            if wanted(name):
                yield name, min(self.decode(*work) for _ in range(2 if work[0] == 1 else 1))
                self.runtime.flush_cache()
        if wanted("prefill_8k"):
            yield "prefill_8k", min(self.run([self.ids(8192)], [1]) for _ in range(4)) * 1e3
        if wanted("first_token_128"):
            yield "first_token_128", min(self.run([self.ids(128)], [1]) for _ in range(9)) * 1e3
        self.runtime.flush_cache()
        if wanted("offline"):
            inputs = [self.rng.randint(100, 1024) for _ in range(1024)]
            outputs = [self.rng.randint(100, 1024) for _ in range(1024)]
            seconds = self.run([self.ids(n) for n in inputs], outputs)
            yield "offline", sum(outputs) / seconds
            self.runtime.flush_cache()
        if wanted("branches_cold") or wanted("branches_warm"):
            prefix = self.ids(8000)
            for name in ("branches_cold", "branches_warm"):
                seconds = self.run([prefix + self.ids(32) for _ in range(64)], [256] * 64)
                if wanted(name):
                    yield name, seconds
            self.runtime.flush_cache()
        if wanted("few_shot"):
            shots = self.ids(2000)
            yield "few_shot", self.run([shots + self.ids(60) for _ in range(512)], [8] * 512)
            self.runtime.flush_cache()


def report(shape: str, name: str, value: float) -> dict[str, object]:
    floor, *peers = SHAPES[shape][name]
    more_is_better = name == "offline"
    best = max(peers) if more_is_better else min(peers)
    return {
        "shape": shape,
        "work": name,
        "unit": UNITS.get(name, "s"),
        "measured": round(value, 4),
        "floor": floor or None,
        "of_floor": round(floor / value, 3) if floor else None,
        "vllm": peers[0],
        "sglang": peers[1],
        "against_better_peer": round(value / best if more_is_better else best / value, 3),
    }


def show(row: dict[str, object]) -> None:
    share = f"{row['of_floor']:.0%}" if row["of_floor"] else "–"
    print(
        f"{row['shape']:14} {row['work']:26} {row['measured']:>10.4g} {row['unit']:10} "
        f"floor {row['floor'] or '–':>6} ({share:>4})  vLLM {row['vllm']:>7}  "
        f"SGLang {row['sglang']:>7}  {row['against_better_peer']:.2f} × the better",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", action="append", choices=list(SHAPES), help="default: all")
    parser.add_argument("--only", action="append", default=[], help="a row's name; may be repeated")
    parser.add_argument("--out", type=Path, help="write JSON here")
    parser.add_argument(
        "--setting",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an engine setting, as JSON",
    )
    options = parser.parse_args()
    import ramet
    import torch

    extra = {}
    for item in options.setting:
        name, _, value = item.partition("=")
        extra[name] = json.loads(value)
    result: dict[str, object] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", "benchmarks/gpu.py", *sys.argv[1:]]),
        "ceilings": {"copy_TB_s": COPY_TBS, "bf16_TFLOP_s": MATMUL_TFLOPS},
        "rows": [],
    }
    rows: list[dict[str, object]] = result["rows"]  # type: ignore[assignment]
    shapes = options.shape or list(SHAPES)
    runs = [(shape, options.only, False) for shape in shapes]
    if not options.only:
        runs.insert(1, (shapes[0], list(DETERMINISTIC), True))
    for shape, only, deterministic in runs:
        begin = time.perf_counter()
        settings = {
            "load_format": "dummy",
            "dtype": "bfloat16",
            "context_length": 10240,
            "mem_fraction_static": 0.85,
            "max_running_requests": 256,
            "random_seed": 0,
            "enable_deterministic_inference": deterministic,
            **extra,
        }
        with ramet.Runtime(
            str(CONFIGS / f"{shape}.json"),
            on_progress=lambda what, at: print(f"  {at:6.1f} s {what}", flush=True),
            on_log=lambda name, line: print(f"  [{name}] {line}", flush=True),
            **settings,
        ) as runtime:
            bench = Bench(runtime)
            bench.run([bench.ids(64)], [1])
            mode = " (deterministic)" if deterministic else ""
            rows.append(
                {
                    "shape": shape,
                    "work": "start" + mode,
                    "unit": "s",
                    "measured": round(time.perf_counter() - begin, 2),
                }
            )
            print(f"{shape}: start to first token {rows[-1]['measured']} s", flush=True)
            bench.warm_up()
            for name, value in bench.rows(only):
                rows.append(report(shape, name, value))
                rows[-1]["work"] = name + mode
                if deterministic:
                    plain = next(r for r in rows if (r["shape"], r["work"]) == (shape, name))
                    rows[-1]["against_plain"] = round(plain["measured"] / value, 3)
                show(rows[-1])
                if options.out:
                    options.out.write_text(json.dumps(result, indent=1))
            print(runtime.server_info(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
