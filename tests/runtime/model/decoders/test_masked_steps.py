"""Steps that sample when their masks have come, on the runner of either kind of device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ramet.runtime.model import graphs
from ramet.runtime.model.device_runner import DeviceRunner

PROMPTS = [[5, 9, 77, 31, 8], [8, 100, 64], [1, 2, 3, 4], [64, 2]]


class _Event:
    """Of a device that does everything at once."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class _Graph:
    """Of the same device: what was recorded is done again, with other inputs."""

    def __init__(self, step: Any, work: Callable[[], None]) -> None:
        metas = [step._meta, *([step._ends.meta] if hasattr(step, "_ends") else [])]
        self._plans, self._work = [meta.plans for meta in metas], work

    def replay(self) -> None:
        for plans in self._plans:
            plans.clear()
        self._work()


@pytest.fixture(params=["host", "device", "captured"])
def runner(request: Any, pair_of: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    ours = pair_of("llama").ours
    if request.param == "host":
        return ours
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    theirs = pair_of("llama").theirs
    from ramet.runtime.model.config import ModelConfig

    config = {**theirs.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    made = DeviceRunner(
        ModelConfig.from_hf(config),
        theirs.state_dict().items(),
        dtype=torch.float32,
        max_rows=8,
        context_length=128,
        device=torch.device("cpu"),
    )
    made.take_memory(600)
    if request.param == "captured":
        monkeypatch.setattr(graphs._Captured, "_record", lambda *of: _Graph(*of))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        made.capture(8, trees=False)
    return made


def evens(made: int) -> list[int]:
    return [2, 4, 6, 40, 64, 98] if made % 2 else [3, 33, 65, 97]


def requests_of(request_of: Any, masked: set[int], **sampling: Any) -> list[Any]:
    requests = [request_of(prompt, 6, **sampling) for prompt in PROMPTS]
    for i in masked:
        requests[i].allowed = evens
    return requests


@pytest.mark.parametrize("masked", [{0}, {1, 3}, {0, 1, 2, 3}])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.5, "seed": 3, "top_p": 0.9}])
def test_masked_rows_take_what_they_may_and_others_what_they_would(
    runner: Any, driver: Any, request_of: Any, masked: set[int], sampling: Any
) -> None:
    free = driver(runner).run(requests_of(request_of, set(), **sampling))
    held = driver(runner).run(requests_of(request_of, masked, **sampling))
    for i, (one, other) in enumerate(zip(free, held)):
        if i not in masked:
            assert other.output == one.output
            assert np.allclose(other.logprobs, one.logprobs, atol=1e-5)
            continue
        assert all(token in evens(made) for made, token in enumerate(other.output))
        assert not any(other.bad)
        alone = request_of(PROMPTS[i], 6, **sampling)
        alone.allowed = evens
        driver(runner).run([alone])
        assert alone.output == other.output


def test_log_probs_are_of_the_raw_logits(runner: Any, driver: Any, request_of: Any) -> None:
    """A mask that allows only what would have come changes nothing, log-probs included."""
    (free,) = driver(runner, top=3).run([request_of(PROMPTS[0], 5)])
    held = request_of(PROMPTS[0], 5)
    held.allowed = lambda made: [free.output[made]]
    driver(runner, top=3).run([held])
    assert held.output == free.output
    assert np.allclose(held.logprobs, free.logprobs, atol=1e-5)
    assert np.allclose([v for _, v in held.tops], [v for _, v in free.tops], atol=1e-5)


def test_a_row_without_a_token_is_bad_alone(runner: Any, driver: Any, request_of: Any) -> None:
    requests = requests_of(request_of, {1})
    requests[1].allowed = lambda made: [] if made == 2 else [7]
    driver(runner).run(requests)
    assert requests[1].bad == [False, False, True, False, False, False]
    assert not any(bad for i in (0, 2, 3) for bad in requests[i].bad)


def test_penalties_count_masked_tokens(runner: Any, driver: Any, request_of: Any) -> None:
    asked = {"frequency_penalty": 2.0, "repetition_penalty": 2.0}
    held = request_of(PROMPTS[0], 6, **asked)
    held.allowed = lambda made: [11, 12, 13]
    driver(runner).run([held])
    assert len(set(held.output)) > 1


def test_greedy_steps_without_log_probs(runner: Any, driver: Any, request_of: Any) -> None:
    """The way on which a device takes the largest raw logit."""
    outputs = []
    for plain in (False, True):
        run = driver(runner)
        requests = requests_of(request_of, {0, 2})
        batch_of = run.batch

        def batch(*args: Any, make: Any = batch_of, plain: bool = plain) -> Any:
            made = make(*args)
            made.want_logprobs = not plain
            if plain:
                made.prompt_logprobs, made.targets = [], []
            return made

        run.batch = batch
        outputs.append([request.output for request in run.run(requests)])
    assert outputs[0] == outputs[1]
