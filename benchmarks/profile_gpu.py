"""Where the time of one step goes on the GPU: kernels by name, and what is left between them.

    python benchmarks/profile_gpu.py --shape qwen2.5-1.5b [--decode 1:640 --prefill 8192] …

``--decode B:C`` profiles a decode step of B requests with C tokens each, ``--prefill T`` a cold
prompt of T tokens. Weights are random; nothing but the model runner takes part.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

CONFIGS = Path(__file__).parent / "configs"


def batch_of(rows, q_lens, kv_lens, slots, decodes, new_rows):
    from ramet.runtime.scheduler.batch import StepBatch

    total = int(sum(q_lens))
    return StepBatch(
        rows=np.array(rows, np.int32),
        q_lens=np.array(q_lens, np.int32),
        kv_lens=np.array(kv_lens, np.int32),
        ids=np.random.default_rng(0).integers(1000, 100_000, total).astype(np.int32),
        slots=slots,
        samples=np.arange(len(rows), dtype=np.int32),
        steps=np.zeros(len(rows), np.int32),
        new_rows=new_rows,
        num_decodes=decodes,
    )


def profile(run, steps: int, label: str) -> dict[str, object]:
    """Kernel times of ``run``, called ``steps`` times, per step."""
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    for _ in range(3):
        run()
    torch.cuda.synchronize()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(steps):
        run()
    last.record()
    torch.cuda.synchronize()
    wall = first.elapsed_time(last) / steps
    with torch_profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in prof.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name].append(event.device_time / 1e3)
    rows = sorted(((sum(t) / steps, len(t) / steps, n) for n, t in times.items()), reverse=True)
    busy = sum(ms for ms, _, _ in rows)
    print(f"\n{label}: {wall:.3f} ms a step, kernels {busy:.3f} ms (overlap counted twice)")
    for ms, count, name in rows[:14]:
        print(f"  {ms:8.3f} ms {ms / wall:6.1%} × {count:6.1f}  {name[:90]}")
    return {
        "step": label,
        "ms": wall,
        "kernel_ms": busy,
        "kernels": [
            {"ms": ms, "calls": count, "name": name[:120]} for ms, count, name in rows[:30]
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen2.5-1.5b")
    parser.add_argument("--decode", action="append", default=[], metavar="B:C")
    parser.add_argument("--prefill", action="append", default=[], type=int, metavar="T")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    import torch
    from ramet.runtime.config import EngineConfig
    from ramet.runtime.model.build import build_runner
    from ramet.runtime.model.store import resolve
    from ramet.runtime.protocol.messages import EngineSampling
    from ramet.runtime.scheduler.batch import NewRow

    path = CONFIGS / f"{options.shape}.json"
    config = EngineConfig.from_settings(
        {
            "model_path": str(path),
            "load_format": "dummy",
            "dtype": "bfloat16",
            "context_length": 10240,
            "random_seed": 0,
        }
    )
    runner = build_runner(config, resolve(str(path)), lambda what: print(what, flush=True))
    results = []
    greedy = EngineSampling(max_new_tokens=1)
    empty = np.empty(0, np.int32)

    def new_rows(count):
        return [NewRow(row, greedy, empty, empty, empty) for row in range(count)]

    for spec in options.decode:
        count, context = map(int, spec.split(":"))
        slots = 16 + np.arange(count * context, dtype=np.int32).reshape(count, context)
        for row in range(count):
            for start in range(0, context - 1, 4096):
                end = min(start + 4096, context - 1)
                runner.launch(
                    batch_of(
                        [row],
                        [end - start],
                        [end],
                        slots[row, start:end],
                        0,
                        [new_rows(row + 1)[row]] if start == 0 else [],
                    )
                )
        step = batch_of(
            range(count), [1] * count, [context] * count, slots[:, -1].copy(), count, []
        )
        results.append(
            profile(lambda step=step: runner.launch(step), 20, f"decode {count} × {context}")
        )
    for tokens in options.prefill:
        slots = 16 + np.arange(tokens, dtype=np.int32)
        step = batch_of([0], [tokens], [tokens], slots, 0, new_rows(1))
        results.append(profile(lambda step=step: runner.launch(step), 5, f"prefill {tokens}"))
    if options.out:
        options.out.write_text(
            json.dumps(
                {"device": torch.cuda.get_device_name(), "shape": options.shape, "steps": results},
                indent=1,
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
