"""The runner's own duties: rows that move or return, late ids, chunks of log-probs, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ramet.runtime.model import host_runner
from ramet.runtime.model.config import ModelConfig
from ramet.runtime.model.families.registry import family_of
from ramet.runtime.model.host_runner import HostRunner, auto_dtype
from ramet.runtime.protocol.errors import ModelError
from ramet.runtime.scheduler.batch import NewRow

PROMPT = [5, 9, 77, 31, 8, 100, 64]


@pytest.fixture
def tiny(pair_of: Any) -> Any:
    return pair_of("llama")


def test_rows_can_move_to_other_slots(tiny: Any, driver: Any, request_of: Any) -> None:
    """The tree may give a row other slots that hold the same KV."""
    run = driver(tiny.ours, top=5)
    expected, moved = request_of(PROMPT, 6), request_of(PROMPT, 6)
    run.run([expected])
    size = len(PROMPT)
    moved.row, moved.slots = 1, np.arange(200, 200 + size + 6)
    for _ in range(3):
        run.step([moved])
    held = moved.slots[:size].copy()
    moved.slots[:size] = np.arange(300, 300 + size)
    with torch.inference_mode():
        tiny.ours.kv[:, :, 300 : 300 + size] = tiny.ours.kv[:, :, held]
        tiny.ours.kv[:, :, held] = 1e4
    batch = run.batch([(moved, 1)], 1)
    batch.moves = [(1, moved.slots[:size].astype(np.int32))]
    moved.output.append(int(tiny.ours.launch(batch).result().tokens[0]))
    while not moved.finished:
        run.step([moved])
    assert moved.output == expected.output


def test_a_retracted_row_goes_on_where_it_was(tiny: Any, driver: Any, request_of: Any) -> None:
    """It comes back with its output as prompt, and draws and penalties continue."""
    asked = {"temperature": 1.2, "seed": 11, "frequency_penalty": 0.9, "top_k": 30}
    run = driver(tiny.ours)
    (expected,) = run.run([request_of(PROMPT, 10, **asked)])
    (first,) = run.run([request_of(PROMPT, 4, **asked)])
    assert first.output == expected.output[:4]
    back = request_of(PROMPT + first.output, 6, **asked)
    back.slots = run.free[run.used : run.used + 30].astype(np.int64)
    batch = run.batch([(back, len(back.prompt))], 0)
    batch.steps = np.array([4], np.int32)
    new = batch.new_rows[0]
    output = np.array(first.output, np.int32)
    batch.new_rows = [NewRow(0, new.sampling, np.array(PROMPT, np.int32), output, new.slots)]
    back.output = [*first.output, int(tiny.ours.launch(batch).result().tokens[0])]
    back.max_new = 10
    while not back.finished:
        run.step([back])
    assert back.output == expected.output


def test_log_probs_of_long_prompts_come_in_chunks(
    tiny: Any, driver: Any, request_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [PROMPT * 3, PROMPT[::-1]]
    whole = driver(tiny.ours, top=3).run([request_of(p, 2) for p in prompts])
    monkeypatch.setattr(host_runner, "LOGITS_BYTES", 4 * tiny.ours.vocab_size * 4)
    parts = driver(tiny.ours, top=3).run([request_of(p, 2) for p in prompts])
    for a, b in zip(whole, parts):
        assert np.allclose(a.prompt_logprobs, b.prompt_logprobs, atol=1e-5)
        assert len(a.tops) == len(b.tops) == len(a.prompt) + 1
        for (ids, values), (other_ids, other) in zip(a.tops, b.tops):
            assert ids.tolist() == other_ids.tolist()
            assert np.allclose(values, other, atol=1e-5)


def test_a_step_that_only_scores(tiny: Any, driver: Any, request_of: Any) -> None:
    run = driver(tiny.ours)
    request = request_of(PROMPT, 1)
    request.slots = np.arange(1, 20)
    batch = run.batch([(request, len(PROMPT))], 0)
    batch.samples, batch.steps = np.zeros(0, np.int32), np.zeros(0, np.int32)
    result = tiny.ours.launch(batch).result()
    assert len(result.tokens) == len(result.bad) == 0
    want = tiny.logprobs(PROMPT)[:-1].gather(1, torch.tensor(PROMPT[1:]).unsqueeze(1))
    assert np.allclose(result.prompt_logprobs[0].values, want.squeeze(1), atol=1e-4)


def test_what_a_step_raises_comes_with_its_result(tiny: Any, driver: Any, request_of: Any) -> None:
    run = driver(tiny.ours)
    request = request_of([5, 9000], 1)
    request.slots = np.arange(1, 20)
    ticket = tiny.ours.launch(run.batch([(request, 2)], 0))
    assert ticket.ready()
    with pytest.raises(IndexError):
        ticket.result()


def test_a_row_of_nan_fails_alone(tiny: Any, driver: Any, request_of: Any) -> None:
    run = driver(tiny.ours)
    good, bad = request_of(PROMPT, 5), request_of(PROMPT, 5)
    (alone,) = run.run([request_of(PROMPT, 5)])
    for row, request in enumerate((good, bad)):
        request.row, request.slots = row, np.arange(100 + 40 * row, 130 + 40 * row)
    run.step([good, bad])
    with torch.inference_mode():
        tiny.ours.kv[:, :, 142] = torch.nan
        while not good.finished:
            run.step([good, bad])
        tiny.ours.kv[:, :, 140:180] = 0
    assert good.output == alone.output
    assert good.bad == [False] * 5
    assert bad.bad == [False] + [True] * 4


def test_float32_kv_beside_bfloat16_weights(tiny: Any, driver: Any, request_of: Any) -> None:
    runner = HostRunner(
        tiny.ours._decoder.config,
        tiny.theirs.state_dict().items(),
        dtype=torch.bfloat16,
        num_slots=300,
        max_rows=4,
        context_length=64,
        kv_dtype=torch.float32,
    )
    assert runner.kv.dtype == torch.float32
    for request in driver(runner).run([request_of(PROMPT, 4), request_of(PROMPT[::-1], 4)]):
        want = tiny.logprobs(request.prompt)[:-1]
        picked = want.gather(1, torch.tensor(request.prompt[1:]).unsqueeze(1)).squeeze(1)
        assert np.allclose(request.prompt_logprobs, picked, atol=0.35)


def build(config: ModelConfig, weights: dict[str, torch.Tensor]) -> HostRunner:
    return HostRunner(
        config,
        weights.items(),
        dtype=torch.float32,
        num_slots=20,
        max_rows=2,
        context_length=16,
    )


def test_wrong_weights_are_named(tiny: Any) -> None:
    config = tiny.ours._decoder.config
    weights = dict(tiny.theirs.state_dict())
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ModelError, match=name):
        build(config, {k: v for k, v in weights.items() if k != name})
    with pytest.raises(ModelError, match=r"up_proj.*\[7, 96\]"):
        build(config, {**weights, name: torch.zeros(7, 96)})
    with pytest.raises(ModelError, match="extra"):
        build(config, {**weights, "model.layers.1.extra.weight": torch.zeros(3)})


def test_padded_vocabularies(tiny: Any, driver: Any, request_of: Any) -> None:
    """Rows beyond the vocabulary can be in the file; they are never sampled."""
    weights = dict(tiny.theirs.state_dict())
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.cat((weights[name], torch.full((5, 96), 50.0)))
    runner = build(tiny.ours._decoder.config, weights)
    (got,) = driver(runner).run([request_of(PROMPT, 4)])
    (want,) = driver(tiny.ours).run([request_of(PROMPT, 4)])
    assert got.output == want.output


def test_unknown_architectures_are_refused() -> None:
    with pytest.raises(ModelError, match=r"mamba.*llama"):
        family_of("mamba")


def test_auto_dtype() -> None:
    fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert auto_dtype("cpu") == (torch.bfloat16 if fast else torch.float32)
    assert auto_dtype("cuda") == torch.bfloat16


def test_what_nobody_reads_may_be_nan(tiny, driver, request_of):
    """What a twin computed goes to the scratch slot, NaNs too. Nobody's padding may read them."""
    run, short, long = driver(tiny.ours), PROMPT * 3, PROMPT * 4
    alone = [run.run([request_of(prompt, 5)])[0].output for prompt in (short, long)]
    try:
        with torch.inference_mode():
            tiny.ours.kv[:, :, 0] = torch.nan
        both = run.run([request_of(short, 5), request_of(long, 5)])
    finally:
        with torch.inference_mode():
            tiny.ours.kv[:, :, 0] = 0
    assert [request.bad for request in both] == [[False] * 5] * 2
    assert [request.output for request in both] == alone
