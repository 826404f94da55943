"""Constraints with a model: what they cost a token, what jumping saves, whom compiling disturbs.

    python benchmarks/structured_model.py [--only masks jumps compiling] [--repeat 3]
    [--out results/structured-model-cpu.json]

SmolLM2 on this machine, greedy. Ways that are compared take turns, and each figure is the best of
``--repeat`` turns (of whom compiling disturbs, the median); nothing else may use the machine
meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from typing import Any

import numpy as np
import ramet as rt
from report import Report

MODEL = "smollm2-135m-instruct"
TOKENS = 96
PROSE = r"[a-zA-Z ,.';:\-]+¬"
"""Ends with what no story holds, so that all answers are as long."""
COUNTED = r"[a-zA-Z ,.';:\-]{400,}"
"""A state a character."""
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": dict.fromkeys(names, kind),
        "required": list(names),
        "additionalProperties": False,
    }
    for names, kind in (
        (("customerIdentifier", "shippingAddressLine", "preferredLanguage"), {"enum": ["a", "b"]}),
        (("temperatureCelsius", "humidityPercent", "windSpeedKmh"), {"type": "integer"}),
        (("isRegistered", "acceptsMarketing", "hasVerifiedEmail"), {"type": "boolean"}),
    )
]
CATASTROPHES: list[dict[str, Any]] = [
    # All of forty choices of two patterns, whose product no automaton holds.
    {
        "type": "string",
        "allOf": [
            {"anyOf": [{"pattern": f"a{{{i},94}}b"}, {"pattern": f"[ab]*a[ab]{{{i}}}c"}]}
            for i in range(20, 60)
        ],
    },
    # So many optional keys that the grammar's rows grow with each.
    {"type": "object", "properties": {f"key{i}": {"type": "null"} for i in range(4000)}},
]


def cost_of_masks(report: Report, runtime: rt.Runtime, repeat: int) -> None:
    """The same number of tokens with a mask at each, and with none."""
    for rows in (1, 16):
        prompts = [f"Chapter {i}. It was a quiet morning" for i in range(rows)]
        free = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        ways = {"free": free}
        for name, regex in (("bound", PROSE), ("counted", COUNTED)):
            ways[name] = {**free, "regex": regex, "jump_forward": False}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(repeat + 1):
            for name, params in ways.items():
                runtime.flush_cache()
                begun = time.perf_counter()
                replies = runtime.generate(prompts, sampling_params=params)
                times[name].append(time.perf_counter() - begun)
                assert all(len(r["output_ids"]) == TOKENS for r in replies)
        for name, what in (("bound", "constrained"), ("counted", "constrained to 400 and more")):
            ratio = min(times[name][1:]) / min(times["free"][1:])
            bar = "≤ 1.05" if name == "bound" else ""
            report.row(f"{what} against free, {rows} rows", ratio, "×", bar=bar)


def jumps(report: Report, runtime: rt.Runtime, repeat: int) -> None:
    """Schemas of long keys, with and without jump-forward: the same text, fewer forwards."""
    steps = {True: 0, False: 0}
    times: dict[bool, list[float]] = {True: [], False: []}
    texts: dict[bool, list[str]] = {True: [], False: []}
    for turn in range(repeat + 1):
        for jump in (True, False):
            runtime.flush_cache()
            before = runtime.server_info()["steps"]
            begun = time.perf_counter()
            for schema in SCHEMAS:
                params = {
                    "temperature": 0,
                    "max_new_tokens": 160,
                    "json_schema": json.dumps(schema),
                    "jump_forward": jump,
                }
                reply = runtime.generate("A record in JSON:\n", sampling_params=params)
                texts[jump].append(reply["text"])
            if turn:
                times[jump].append(time.perf_counter() - begun)
                steps[jump] += runtime.server_info()["steps"] - before
    assert texts[True] == texts[False], "jumping changed a text"
    saved = 100 * (1 - steps[True] / steps[False])
    report.row("forwards saved by jump-forward, key-heavy schemas", saved, "%", bar="≥ 40")
    faster = min(times[False]) / min(times[True])
    report.row("end to end, without jumps / with", faster, "×", bar="≥ 1.3")


async def gaps_of(runtime: rt.Runtime, streams: int) -> list[float]:
    """Seconds between the pieces of some free streams."""
    found: list[float] = []

    async def one(number: int) -> None:
        params = {"temperature": 0, "max_new_tokens": 192, "ignore_eos": True}
        pieces = await runtime.async_generate(
            f"Story {number}: once upon a time", sampling_params=params, stream=True
        )
        last = None
        async for _ in pieces:
            now = time.perf_counter()
            if last is not None:
                found.append(now - last)
            last = now

    await asyncio.gather(*map(one, range(streams)))
    return found


async def disturbance(report: Report, runtime: rt.Runtime, repeat: int) -> None:
    """Free streams while ten schemas that nobody has seen compile, two of them catastrophic. The
    engine has met a schema before: for its first one it gives the library its vocabulary."""
    draw = random.Random(1)

    def fresh() -> list[dict[str, Any]]:
        new = []
        for schema in SCHEMAS * 3:
            tag = f"{draw.randrange(10**9)}"
            properties = {f"{k}{tag}": v for k, v in schema["properties"].items()}
            new.append({**schema, "properties": properties, "required": list(properties)})
        return [*new[:8], *({**c, "title": str(draw.random())} for c in CATASTROPHES)]

    async def compile_one(schema: dict[str, Any]) -> str:
        params = {"temperature": 0, "max_new_tokens": 1, "json_schema": json.dumps(schema)}
        begun = time.perf_counter()
        try:
            await runtime.async_generate("{", sampling_params=params)
        except rt.RametError as error:
            refused.append(time.perf_counter() - begun)
            return type(error).__name__
        return "done"

    ratios: list[float] = []
    refused: list[float] = []
    ends: list[str] = []
    await compile_one(SCHEMAS[0])
    await gaps_of(runtime, 4)
    for _ in range(repeat):
        calm = np.percentile(await gaps_of(runtime, 4), 99)
        work = [asyncio.ensure_future(compile_one(schema)) for schema in fresh()]
        ratios.append(float(np.percentile(await gaps_of(runtime, 4), 99) / calm))
        ends += await asyncio.gather(*work)
    note = ", ".join(f"{ends.count(end)} {end}" for end in sorted(set(ends)))
    note = f"{min(ratios):.2f}–{max(ratios):.2f}; {note}"
    what = "p99 between tokens of free streams while ten compile"
    report.row(what, float(np.median(ratios)), "×", bar="≤ 1.2", note=note)
    report.row("a catastrophic schema is refused after, at most", max(refused), "s", bar="≤ 12")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeat", type=int, default=3)
    parts = ("masks", "jumps", "compiling")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    report = Report("structured, with a model")
    with rt.Runtime(MODEL, dtype=options.dtype, max_total_tokens=16_384) as runtime:
        runtime.generate("warm", sampling_params={"max_new_tokens": 4, "regex": "[a-z]{4}"})
        if "masks" in options.only:
            cost_of_masks(report, runtime, options.repeat)
        if "jumps" in options.only:
            jumps(report, runtime, options.repeat)
        if "compiling" in options.only:
            asyncio.run(disturbance(report, runtime, options.repeat))
    report.write(options.out)


if __name__ == "__main__":
    main()
