"""Many requests on a tiny model: nothing leaks, nothing hangs."""

from __future__ import annotations

import random

import pytest
import torch

REQUESTS = 20_000


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_soak(make_runner, drive):
    rng = random.Random(0)
    runner = make_runner("qwen2", on="cuda", dtype=torch.bfloat16, slots=2048, rows=48)
    driver = drive(runner, slots=2048, rows=48, step_tokens=512)
    stems = [[rng.randrange(1000) for _ in range(60)] for _ in range(20)]
    live: dict[int, object] = {}
    aborted = 0
    memory = 0
    for number in range(REQUESTS):
        prompt = rng.choice(stems)[: rng.randint(1, 60)]
        prompt += [rng.randrange(1000) for _ in range(rng.randint(0, 80))]
        options = {"temperature": 0.8, "seed": number} if rng.random() < 0.3 else {}
        rid = driver.add(prompt, rng.randint(0, 24), stop_ids=(rng.randrange(1000),), **options)
        live[rid] = driver.scheduler.waiting[-1]
        while len(driver.scheduler.waiting) > 32:
            driver.step()
        if rng.random() < 0.1:
            victim = live.pop(rng.choice(list(live)))
            if victim.row >= 0 or victim in driver.scheduler.waiting:
                driver.scheduler.remove(victim)
                aborted += 1
        if len(live) > 64:
            live = {r: q for r, q in live.items() if q.row >= 0 or q in driver.scheduler.waiting}
        if number % 2000 == 1999:
            driver.scheduler.assert_consistent()
        if number == REQUESTS // 4:
            torch.cuda.synchronize()
            memory = torch.cuda.memory_allocated()
    driver.run()
    torch.cuda.synchronize()
    usage = driver.memory.usage()
    assert usage.held == 0
    assert usage.free + usage.evictable == usage.total
    assert aborted > 500
    assert torch.cuda.memory_allocated() <= memory + (1 << 20)
    assert not driver.failed
