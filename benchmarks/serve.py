"""The HTTP server: what its gateway costs by itself, and what it leaves of the engine's speed.

    python benchmarks/serve.py [--only streams] [--dtype bfloat16] [--out results/serve-cpu.json]

``streams``, ``whole`` and ``short`` have a stub in the engine's place (stub_engine.py), which emits
tokens at a fixed rate and costs next to nothing; ``inprocess`` and ``tree`` run SmolLM2. Beside the
JSON of ``--out`` the same table is written as Markdown. Nothing else may use the machine meanwhile:
the gateway, the client and the stub share its cores.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import ramet as rt
import stub_engine
from ramet.cli_bench_load import Load, Reply
from ramet.runtime import launch
from ramet.runtime.gateway.tokenizer import Tokenizer
from ramet.runtime.model.store import resolve
from report import Report

MODEL = "smollm2-135m-instruct"
STREAMS = 256
RULES = " ".join(f"Rule {i}: be brief, be kind, and name your sources." for i in range(85))


def cpu_seconds(pid: int) -> float:
    """What a process has used so far, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def good(replies: list[Reply]) -> list[Reply]:
    bad = [reply for reply in replies if reply.status != 200]
    assert not bad, bad[0].failure or bad[0].body()[:300]
    return replies


def completion(**more: object) -> dict[str, object]:
    return {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True, **more}


# --- the gateway alone ----------------------------------------------------------------------------


def streams(report: Report, options: argparse.Namespace) -> None:
    """256 streams that grow together, 10,000 tokens a second."""
    rate, seconds = 10_000, options.seconds
    tokens = int(rate / STREAMS * seconds)
    with (
        tempfile.NamedTemporaryFile() as times,
        stub_engine.launched("--rate", str(rate), "--times", times.name) as running,
    ):
        pid = running.pids["gateway"]

        async def run() -> tuple[list[Reply], float]:
            load = Load(str(running.url))
            request = load.request("/v1/completions", completion(max_tokens=tokens, stream=True))
            work = asyncio.create_task(load.run([request] * STREAMS))
            await asyncio.sleep(seconds * 0.2)  # all have begun
            began, used = time.monotonic(), cpu_seconds(pid)
            await asyncio.sleep(seconds * 0.6)  # none has ended
            share = (cpu_seconds(pid) - used) / (time.monotonic() - began)
            replies = await work
            load.close()
            return good(replies), share

        replies, share = asyncio.run(run())
        sent = np.fromfile(times.name, np.float64)
    words = stub_engine.words_of(Tokenizer.from_files(resolve(MODEL)))
    step_of = {text: step for step, (_, text) in enumerate(words)}
    added: list[float] = []
    for reply in replies:
        for at, event in reply.events():
            added += [at - sent[step_of[word]] for word in event["choices"][0]["text"].split()]
    assert len(added) == STREAMS * tokens
    begun = min(reply.sent for reply in replies)
    ended = max(reply.ended for reply in replies)
    report.row("10,000 tok/s, 256 streams: reached", len(added) / (ended - begun), "tok/s")
    report.row("10,000 tok/s, 256 streams: gateway's share", 100 * share, "% of core", bar="≤ 60")
    for percent, bar in ((50, ""), (99, "≤ 5")):
        late = 1000 * float(np.percentile(added, percent))
        report.row(f"10,000 tok/s, 256 streams: added, p{percent}", late, "ms", bar=bar)


def whole(report: Report, options: argparse.Namespace) -> None:
    """256 requests at a time that want no stream, 40,000 tokens a second."""
    rate, seconds = 40_000, options.seconds
    tokens = min(int(rate / STREAMS * seconds), stub_engine.CONTEXT - 64)
    with stub_engine.launched("--rate", str(rate)) as running:
        pid = running.pids["gateway"]

        async def run() -> tuple[float, float]:
            load = Load(str(running.url))
            request = load.request("/v1/completions", completion(max_tokens=tokens))
            began, used = time.monotonic(), cpu_seconds(pid)
            good(await load.run([request] * STREAMS))
            took = time.monotonic() - began
            load.close()
            return took, (cpu_seconds(pid) - used) / took

        took, share = asyncio.run(run())
    report.row("40,000 tok/s, 256 whole: reached", STREAMS * tokens / took, "tok/s")
    report.row("40,000 tok/s, 256 whole: gateway's share", 100 * share, "% of core", bar="≤ 50")


def short(report: Report, options: argparse.Namespace) -> None:
    """Completions of one token, 64 at a time."""
    with stub_engine.launched() as running:

        async def run() -> float:
            load = Load(str(running.url))
            request = load.request("/v1/completions", completion(max_tokens=1))
            good(await load.run([request] * 500, concurrency=64))
            count = int(1000 * options.seconds)
            began = time.monotonic()
            good(await load.run([request] * count, concurrency=64))
            took = time.monotonic() - began
            load.close()
            return count / took

        best = max(asyncio.run(run()) for _ in range(options.repeat))
    report.row("completions of one token", best, "requests/s", bar="≥ 1,500")


# --- with the model -------------------------------------------------------------------------------


def settings(options: argparse.Namespace) -> dict[str, object]:
    return {
        "dtype": options.dtype, "max_total_tokens": 65_536, "context_length": 4096,
        "max_running_requests": 32,
    }  # fmt: skip


def inprocess(report: Report, options: argparse.Namespace) -> None:
    """16 requests of 288 tokens, 256 of them shared, and 64 generated: over HTTP and without."""
    count, shared, own, out = 16, 256, 32, 64
    given = settings(options)
    served = launch.start({"model_path": MODEL, "port": 0, "zmq_port": 0, **given}, listen=True)
    try:
        with rt.Runtime(MODEL, **given) as runtime:

            def inside(prompts: list[list[int]]) -> float:
                runtime.flush_cache()
                sampling = {"temperature": 0, "max_new_tokens": out, "ignore_eos": True}
                began = time.monotonic()
                runtime.generate(input_ids=prompts, sampling_params=sampling)
                return time.monotonic() - began

            def outside(prompts: list[list[int]], stream: bool) -> float:
                async def run() -> float:
                    load = Load(str(served.url))
                    good([await load.ask(load.request("/flush_cache"))])
                    requests = [
                        load.request(
                            "/v1/completions",
                            completion(prompt=ids, max_tokens=out, stream=stream),
                        )
                        for ids in prompts
                    ]
                    began = time.monotonic()
                    good(await load.run(requests))
                    took = time.monotonic() - began
                    load.close()
                    return took

                return asyncio.run(run())

            ways: dict[str, Callable[[list[list[int]]], float]] = {
                "in-process": inside,
                "HTTP, whole": lambda prompts: outside(prompts, False),
                "HTTP, streamed": lambda prompts: outside(prompts, True),
            }
            best = dict.fromkeys(ways, float("inf"))
            rng = random.Random(1)
            for turn in range(options.repeat + 1):
                for name, way in ways.items():
                    stem = [rng.randrange(100, 48_000) for _ in range(shared)]
                    prompts = [
                        stem + [rng.randrange(100, 48_000) for _ in range(own)]
                        for _ in range(count)
                    ]
                    took = way(prompts)
                    if turn:  # the first warms up
                        best[name] = min(best[name], took)
    finally:
        served.stop()
    for name, took in best.items():
        report.row(f"SmolLM2, 16 requests: {name}", count * out / took, "tok/s")
    for name in ("HTTP, whole", "HTTP, streamed"):
        ratio = best["in-process"] / best[name]
        report.row(f"SmolLM2, 16 requests: {name} / in-process", ratio, "×", bar="≥ 0.97")


def tree(report: Report, options: argparse.Namespace) -> None:
    """20 chats with one long system prompt at once, twice; the second time, tree on and off."""
    means: dict[str, float] = {}
    for mode in ("on", "off"):
        given = {**settings(options), "disable_radix_cache": mode == "off"}
        served = launch.start({"model_path": MODEL, "port": 0, "zmq_port": 0, **given}, listen=True)

        async def run(url: str) -> list[float]:
            load = Load(url)
            requests = [
                load.request(
                    "/v1/chat/completions",
                    {
                        "messages": [
                            {"role": "system", "content": RULES},
                            {"role": "user", "content": f"Question {number}: name a colour."},
                        ],
                        "max_tokens": 60,
                    },
                )
                for number in range(20)
            ]
            found = []
            for _ in range(2):
                replies = good(await load.run(requests))
                found.append(sum(reply.ended - reply.sent for reply in replies) / len(replies))
            load.close()
            return found

        try:
            first, second = asyncio.run(run(str(served.url)))
        finally:
            served.stop()
        means[mode] = second
        report.row(f"20 chats, long system prompt: tree {mode}, first", first, "s")
        report.row(f"20 chats, long system prompt: tree {mode}, second", second, "s")
    ratio = means["on"] / means["off"]
    report.row("20 chats, long system prompt: on / off, second", ratio, "×", bar="≤ 0.5")


WORK = {
    "streams": streams, "whole": whole, "short": short, "inprocess": inprocess, "tree": tree,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", default=[], choices=list(WORK))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load on the stub")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", help="write JSON here, and Markdown beside it")
    options = parser.parse_args()
    report = Report(f"serve, {options.dtype}")
    for name, work in WORK.items():
        if not options.only or name in options.only:
            work(report, options)
            report.write(options.out)
            report.write_table(options.out)


if __name__ == "__main__":
    main()
