"""Programs that branch, with the radix tree on against off: how much sharing is worth.

    python benchmarks/programs.py [--only tree_of_thought] [--dtype bfloat16] [--out results.json]

Each workload runs on a runtime with the tree and on one without (``disable_radix_cache``), turn by
turn. "computed / distinct" divides the tokens that the model computed by the distinct tokens there
are, which is what the tree holds at the end (its pool is large enough for all).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import ramet as rt
from report import Report

TOPICS = ["sleep", "tea", "rain", "chess", "bread", "rivers", "violins", "bees"]
SHOTS = "".join(
    f"Question: What is {a} plus {b}?\nThought: I add {a} and {b}, which gives {a + b}.\n"
    f"Answer: {a + b}\n\n"
    for a, b in ((i * 7 % 50, i * 11 % 40) for i in range(1, 25))
)
ARTICLE = " ".join(
    f"In section {i} the author describes how the {TOPICS[i % 8]} of the valley changed over "
    f"{10 + i} years, and what the people who lived there made of it." for i in range(24)
)  # fmt: skip


@rt.function
def few_shot(s, question):
    s += SHOTS + f"Question: {question}\nAnswer:" + rt.gen("answer", max_tokens=1)


@rt.function
def select(s, statement):
    s += SHOTS + f"Statement: {statement}\nIs it true? Answer:"
    s += rt.select("verdict", [" yes", " no", " unknown"])


@rt.function
def tree_of_thought(s, topic):
    s += SHOTS + f"Problem: plan a day about {topic}.\n"
    branches = [s]
    for stage in ("Plan", "Do", "Check"):
        grown = []
        for branch in branches:
            forks = branch.fork(2)
            for i, fork in enumerate(forks):
                fork += f"{stage} {i}:" + rt.gen("step", max_tokens=16, ignore_eos=True)
                grown.append(fork)
        branches = grown[:4]
    s["steps"] = "; ".join(branch["step"] for branch in branches)


@rt.function
def skeleton_of_thought(s, topic):
    s += SHOTS + f"Give three short points about {topic}.\n1."
    s += rt.gen("points", max_tokens=24, ignore_eos=True)
    forks = s.fork(3)
    for i, fork in enumerate(forks):
        fork += f"\nExpand point {i + 1}:" + rt.gen("text", max_tokens=32, ignore_eos=True)
    s["all"] = " ".join(fork["text"] for fork in forks)


@rt.function
def judge(s, topic):
    s += f"Essay about {topic}: {ARTICLE}\n"
    forks = s.fork(6)
    for i, fork in enumerate(forks):
        fork += f"Judge dimension {i}:" + rt.gen("view", max_tokens=16, ignore_eos=True)
    forks.join()
    s += "Score:" + rt.gen("score", max_tokens=2, ignore_eos=True)


@rt.function
def react(s, topic):
    s += SHOTS + f"Task: find out about {topic}.\n"
    for turn in range(4):
        s += f"Thought {turn}:" + rt.gen("thought", max_tokens=12, ignore_eos=True)
        s += f"\nObservation {turn}: the archive says that {topic} was seen {turn} times.\n"
        _ = s["thought"]  # an agent looks at each thought before it acts


@rt.function
def multi_turn(s, topic):
    for turn in range(4):
        s += rt.user(f"Turn {turn}: tell me more about {topic}. " + ARTICLE[: 300 + 40 * turn])
        s += rt.assistant(rt.gen("reply", max_tokens=8, ignore_eos=True))
        _ = s["reply"]


WORKLOADS: dict[str, tuple[rt.Function, str, list[str], str]] = {
    "few_shot": (few_shot, "question", [f"What is {i} plus 3?" for i in range(32)], "≥ 5"),
    "select": (select, "statement", [f"{i} is an even number." for i in range(16)], "≥ 5"),
    "tree_of_thought": (tree_of_thought, "topic", TOPICS[:4], "≥ 1.3"),
    "skeleton_of_thought": (skeleton_of_thought, "topic", TOPICS[:4], ""),
    "judge": (judge, "topic", TOPICS[:2], "≥ 1.3"),
    "react": (react, "topic", TOPICS[:4], ""),
    "multi_turn": (multi_turn, "topic", TOPICS[:4], ""),
}


def random_prompts(runtime: rt.Runtime) -> Callable[[], None]:
    """Prompts that share nothing: what the tree costs where it cannot help."""
    import random

    rng = random.Random(7)

    def run() -> None:
        prompts = [[rng.randrange(100, 48_000) for _ in range(200)] for _ in range(8)]
        runtime.generate(
            input_ids=prompts,
            sampling_params={"temperature": 0, "max_new_tokens": 16, "ignore_eos": True},
        )

    return run


def timed(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure(
    report: Report,
    name: str,
    works: dict[str, Callable[[], None]],
    runtimes: dict[str, rt.Runtime],
    repeat: int,
    bar: str,
) -> None:
    best = dict.fromkeys(works, float("inf"))
    for turn in range(repeat + 1):
        for mode, work in works.items():
            runtimes[mode].flush_cache()
            before = runtimes[mode].server_info()["computed_tokens"]
            seconds = timed(work)
            if turn:
                best[mode] = min(best[mode], seconds)
            info = runtimes[mode].server_info()
            if mode == "tree" and turn == repeat and name != "random prompts":
                share = (info["computed_tokens"] - before) / info["pages"]["cached"]
                report.row(f"{name}: computed / distinct", share, "", bar="≤ 1.02")
    for mode, seconds in best.items():
        report.row(f"{name}: {mode}", seconds, "s")
    report.row(f"{name}: off / tree", best["off"] / best["tree"], "×", bar=bar)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", default=[], choices=list(WORKLOADS))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    report = Report(f"programs, {options.dtype}")
    settings = {
        "dtype": options.dtype,
        "max_total_tokens": 65_536,
        "context_length": 4096,
        "max_running_requests": 32,
    }
    with (
        rt.Runtime("smollm2-135m-instruct", **settings) as tree,
        rt.Runtime("smollm2-135m-instruct", disable_radix_cache=True, **settings) as off,
    ):
        runtimes = {"tree": tree, "off": off}
        for name, (function, argument, values, bar) in WORKLOADS.items():
            if options.only and name not in options.only:
                continue
            arguments = [{argument: value} for value in values]

            def run(backend: rt.Runtime, f=function, batch=arguments) -> None:
                for state in f.run_batch(batch, backend=backend, temperature=0):
                    state.sync()

            works = {mode: (lambda r=r: run(r)) for mode, r in runtimes.items()}
            measure(report, name, works, runtimes, options.repeat, bar)
            report.write(options.out)
        if not options.only:
            works = {mode: random_prompts(r) for mode, r in runtimes.items()}
            measure(report, "random prompts", works, runtimes, 2 * options.repeat, "≥ 0.99")
    report.write(options.out)


if __name__ == "__main__":
    main()
