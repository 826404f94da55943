"""Steps whose masks come after their forward was launched, one step in flight."""

from __future__ import annotations

import numpy as np
import pytest
from ramet.runtime.protocol.sampling import Constraint

ANY = Constraint("regex", ".*")


def jobs() -> list[tuple[list[int], dict]]:
    found = []
    for i in range(12):
        prompt = [(i * 37 + j * 11) % 1000 for j in range(5 + 9 * i)]
        more = {} if i % 3 == 0 else {"constraint": ANY}
        if i % 4 == 3:
            more |= {"temperature": 0.8, "top_p": 0.9, "seed": i}
        found.append((prompt, more))
    return found


def outputs(driver, work):
    rids = [driver.add(prompt, 20, logprobs=True, **more) for prompt, more in work]
    driver.run()
    return [(driver.tokens[r], driver.logprobs[r]) for r in rids]


@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
def test_equals_the_cpu(captured, make_runner, drive):
    work = jobs()
    host = outputs(drive(make_runner("llama", on="cpu"), slots=4096, step_tokens=100), work)
    runner = make_runner("llama", on="cuda", captured=captured)
    device = outputs(drive(runner, slots=4096, step_tokens=100), work)
    runner.close()
    for (_, more), (want, want_logprobs), (have, have_logprobs) in zip(work, host, device):
        if "constraint" in more:
            assert all(t % (5 if made % 2 else 7) == 0 for made, t in enumerate(have))
        same = next((i for i, (a, b) in enumerate(zip(want, have)) if a != b), len(want))
        assert np.allclose(want_logprobs[:same], have_logprobs[:same], atol=1e-3)
        assert same == len(want) or abs(want_logprobs[same] - have_logprobs[same]) < 1e-3


def test_free_rows_are_what_they_are_alone(make_runner, drive):
    runner = make_runner("llama", on="cuda")
    work = [(prompt, more) for prompt, more in jobs() if "constraint" not in more]
    alone = outputs(drive(runner, slots=4096), work)
    mixed = outputs(drive(runner, slots=4096), jobs())
    runner.close()
    free = [out for (_, more), out in zip(jobs(), mixed) if "constraint" not in more]
    for (want, want_logprobs), (have, have_logprobs) in zip(alone, free):
        same = next((i for i, (a, b) in enumerate(zip(want, have)) if a != b), len(want))
        assert np.allclose(want_logprobs[:same], have_logprobs[:same], atol=1e-3)
        assert same == len(want) or abs(want_logprobs[same] - have_logprobs[same]) < 1e-3
