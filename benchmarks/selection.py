"""`select` after a long prompt against one request a choice, which is what it was before tries.

    python benchmarks/selection.py [--choices 20 100 500] [--prompt 512] [--dtype float32]
                                   [--repeat 3] [--out results/selection-cpu.json]

The model is SmolLM2-135M-Instruct, the prompt is there already (all but its last token is computed
once, before). Both ways give the same scores, which is checked. Times are the best of ``--repeat``
turns, taken in turns; counts of tokens are exact.
"""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

import ramet as rt
from report import Report

PLACES = ["north", "south", "east", "west"]


@rt.function
def pick(s: Any, prompt: str, choices: list[str]) -> None:
    s += prompt
    s += rt.select("best", choices)


def choices_of(count: int) -> list[str]:
    """Sentences that begin alike, as labels and answers do."""
    return [f" in the {PLACES[i % 4]}, at number {i // 4}" for i in range(count)]


def nodes_of(rows: list[list[int]]) -> int:
    """Tokens of the tree of these sequences."""
    return len({tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)})


def common(rows: list[list[int]]) -> int:
    """Tokens that all begin with."""
    first, last = min(rows), max(rows)
    pairs = enumerate(zip(first, last))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(last)))


def computed(runtime: Any) -> int:
    return runtime.server_info()["computed_tokens"]


def by_select(runtime: Any, prompt: str, choices: list[str]) -> list[float]:
    meta = pick.run(prompt, choices, backend=runtime).get_meta_info("best")
    rows = meta["input_token_logprobs"]
    return [math.fsum(value for value, _, _ in row) for row in rows]


def one_by_one(runtime: Any, start: int, whole: list[list[int]]) -> list[float]:
    """Every choice scored by a request of its own, all at the same time."""
    replies = runtime.generate(
        input_ids=whole,
        sampling_params={"max_new_tokens": 0, "temperature": 0},
        return_logprob=True,
        logprob_start_len=start,
    )
    rows = [reply["meta_info"]["input_token_logprobs"] for reply in replies]
    return [math.fsum(value for value, _, _ in row) for row in rows]


def measure(runtime: Any, report: Report, prompt: str, count: int, repeat: int) -> None:
    choices = choices_of(count)
    encode = runtime.tokenizer.encode
    whole = [encode(prompt + choice) for choice in choices]
    start = common([encode(prompt), *whole])
    nodes = nodes_of([row[start:] for row in whole])
    runtime.generate(input_ids=[whole[0][:start]], sampling_params={"max_new_tokens": 0})
    seconds: dict[str, list[float]] = {"select": [], "one by one": []}
    tokens: dict[str, int] = {}
    scores: dict[str, list[float]] = {}
    for _ in range(repeat):
        for name in seconds:
            before, began = computed(runtime), time.perf_counter()
            if name == "select":
                scores[name] = by_select(runtime, prompt, choices)
            else:
                scores[name] = one_by_one(runtime, start, whole)
            seconds[name].append(time.perf_counter() - began)
            tokens[name] = computed(runtime) - before
    gap = max(abs(a - b) for a, b in zip(scores["select"], scores["one by one"], strict=True))
    assert gap < 0.1, f"the two ways differ by {gap}"
    of = f"{count} choices: "
    report.row(of + "tokens of their tree", nodes, "tokens")
    report.row(of + "computed by select", tokens["select"], "tokens", bar=f"< {1.2 * nodes:.0f}")
    report.row(of + "computed one by one", tokens["one by one"], "tokens")
    best = {name: min(times) for name, times in seconds.items()}
    report.row(of + "select", best["select"], "s")
    report.row(of + "one by one", best["one by one"], "s")
    ratio = best["one by one"] / best["select"]
    report.row(of + "ratio", ratio, "x", note=f"scores within {gap:.1g}")


def main() -> None:
    parser = argparse.ArgumentParser(description="select against one request a choice")
    parser.add_argument("--choices", type=int, nargs="+", default=[20, 100, 500])
    parser.add_argument("--prompt", type=int, default=512, help="tokens, about")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out")
    args = parser.parse_args()
    report = Report("select")
    prompt = "The old house stood by the road. " * (args.prompt // 8) + "Now it stands"
    settings = {"dtype": args.dtype, "max_total_tokens": 16_384, "context_length": 4096}
    with rt.Runtime("smollm2-135m-instruct", **settings) as runtime:
        for count in args.choices:
            measure(runtime, report, prompt, count, args.repeat)
    report.write(args.out)


if __name__ == "__main__":
    main()
