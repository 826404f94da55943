"""Every family against transformers with the same random weights, in every shape of step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

TOLERANCE = 1e-4


def full(tops: list[tuple[np.ndarray, np.ndarray]], vocab: int) -> torch.Tensor:
    """[n, V] from top log-probs that were asked for over the whole vocabulary."""
    out = torch.full((len(tops), vocab), torch.nan)
    for row, (ids, values) in enumerate(tops):
        out[row, torch.from_numpy(ids).long()] = torch.from_numpy(values)
    return out


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(3, 131, size=n).tolist() for n in (23, 1, 9, 40, 2)]


def check(pair: Any, request: Any) -> None:
    tokens = request.prompt + request.output
    want = pair.logprobs(tokens)
    got = full(request.tops, pair.ours.vocab_size)
    assert len(got) == len(tokens) - 1
    assert (got - want[:-1]).abs().max() < TOLERANCE
    picked = want[:-1].gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1)
    split = len(request.prompt) - 1
    assert torch.allclose(
        torch.tensor(request.prompt_logprobs + request.logprobs), picked, atol=TOLERANCE
    )
    greedy = want[split:-1].argmax(-1)
    assert request.output == greedy.tolist()


@pytest.mark.parametrize("scatter", [False, True], ids=["runs", "scattered"])
@pytest.mark.parametrize("chunk", [1 << 30, 5], ids=["whole", "chunked"])
def test_alone(pair: Any, driver: Any, request_of: Any, chunk: int, scatter: bool) -> None:
    run = driver(pair.ours, chunk=chunk, top=pair.ours.vocab_size, scatter=scatter)
    for prompt in prompts()[:2]:
        (request,) = run.run([request_of(prompt, 12)])
        check(pair, request)


@pytest.mark.parametrize("chunk", [1 << 30, 16], ids=["whole", "chunked"])
def test_in_a_batch(pair: Any, driver: Any, request_of: Any, chunk: int) -> None:
    """Ragged prompts and lengths: steps mix decodes and chunks, some of which end a prompt."""
    run = driver(pair.ours, chunk=chunk, top=pair.ours.vocab_size, scatter=True)
    requests = [request_of(p, n) for p, n in zip(prompts(), (4, 14, 9, 3, 11))]
    for request in run.run(requests):
        check(pair, request)


@pytest.mark.parametrize("chunk", [1 << 30, 16], ids=["whole", "chunked"])
def test_the_last_layer_goes_on_with_the_tokens_that_are_looked_at(
    pair: Any, driver: Any, request_of: Any, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = (4, 14, 9, 3, 11)
    scored = [request_of(p, n) for p, n in zip(prompts(), lengths)]
    driver(pair.ours, chunk=chunk, top=9).run(scored)
    rows: list[int] = []
    last = pair.ours._decoder.mlps[-1].down
    apply = type(last).apply

    def counting(linear: Any, x: torch.Tensor) -> torch.Tensor:
        if linear is last:
            rows.append(len(x))
        return apply(linear, x)

    monkeypatch.setattr(type(last), "apply", counting)
    alone = [request_of(p, n) for p, n in zip(prompts(), lengths)]
    driver(pair.ours, chunk=chunk, top=9, scores=False).run(alone)
    assert max(rows) <= len(alone), "not the prompts' other tokens"
    for one, other in zip(scored, alone):
        assert other.output == one.output
        assert np.allclose(other.logprobs, one.logprobs, atol=TOLERANCE)
        for (ids, values), (known, wanted) in zip(other.tops, one.tops[len(one.prompt) - 1 :]):
            assert ids.tolist() == known.tolist()
            assert np.allclose(values, wanted, atol=TOLERANCE)


def test_shared_prefix(pair: Any, driver: Any, request_of: Any) -> None:
    """Requests that read the same slots for a prefix give what they give alone."""
    run = driver(pair.ours, top=pair.ours.vocab_size)
    prefix = prompts()[3]
    (owner,) = run.run([request_of(prefix, 1)])
    branches = [request_of([*prefix, 3 + i, 9 + i], 8) for i in range(3)]
    for row, branch in enumerate(branches):
        branch.row, branch.known, branch.done = row, True, len(prefix)
        own = run.free[run.used : run.used + 12]
        run.used += 12
        branch.slots = np.concatenate((owner.slots[: len(prefix)], own)).astype(np.int64)
    batch = run.batch([(b, 2) for b in branches], 0)
    batch.new_rows = _rows(branches, len(prefix))
    result = pair.ours.launch(batch).result()
    for at, branch in enumerate(branches):
        branch.output.append(int(result.tokens[at]))
    while live := [b for b in branches if not b.finished]:
        run.step(live)
    for branch in branches:
        want = pair.logprobs(branch.prompt + branch.output)
        split = len(branch.prompt) - 1
        assert branch.output == want[split:-1].argmax(-1).tolist()


def _rows(branches: list[Any], cached: int) -> list[Any]:
    from ramet.runtime.scheduler.batch import NewRow

    none = np.zeros(0, np.int32)
    return [
        NewRow(
            b.row, b.sampling, np.array(b.prompt, np.int32), none, b.slots[:cached].astype(np.int32)
        )
        for b in branches
    ]
