"""Continuations scored as a tree in one pass, against a forward of transformers over each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ramet.runtime.memory.kv_memory import KVMemory
from ramet.runtime.protocol.messages import EngineSampling
from ramet.runtime.protocol.trie import Trie
from ramet.runtime.scheduler.request import Request
from ramet.runtime.scheduler.scheduler import Limits, Scheduler
from ramet.runtime.scheduler.trie import trie_of

NAMES = ["llama-tied-llama3", "mistral-window", "qwen2", "qwen3", "gemma3", "gemma3-capped"]
PATHS = [
    [5, 6, 7], [5, 6, 8, 9], [5], [4, 1], [4, 2], [3], [5, 9],
    [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21],
    [10, 11, 12, 13, 14, 15, 16, 17, 18, 30, 31, 32],
]  # fmt: skip


def tree() -> tuple[list[list[int]], Trie]:
    """The path of each node, depth first, and the tree as a message."""
    nodes = sorted({tuple(path[:end]) for path in PATHS for end in range(1, len(path) + 1)})
    number = {node: i for i, node in enumerate(nodes)} | {(): -1}
    tokens = np.array([node[-1] for node in nodes], np.int32)
    parents = np.array([number[node[:-1]] for node in nodes], np.int32)
    return [list(n) for n in nodes], Trie(tokens=tokens.tobytes(), parents=parents.tobytes())


class Scoring:
    """Requests through scheduler and runner to their end."""

    def __init__(self, runner: Any, step_tokens: int) -> None:
        self.runner = runner
        limits = Limits(max_rows=4, context_length=256, step_tokens=step_tokens)
        self.scheduler = Scheduler(limits, KVMemory(256, 16))
        self.values: dict[int, dict[int, float]] = {}
        self.steps = 0

    def add(self, rid: int, prompt: list[int], message: Trie) -> None:
        trie = trie_of(message, 131)
        tokens = np.concatenate((np.array(prompt, np.int32), trie.nodes))
        sampling = EngineSampling(max_new_tokens=0)
        self.scheduler.add(Request(rid, b"t", sampling, tokens, len(prompt), trie=trie))

    def run(self) -> None:
        while not self.scheduler.idle:
            planned = self.scheduler.plan()
            assert planned is not None
            self.steps += 1
            result = self.runner.launch(planned.batch).result()
            for (request, start), values in zip(planned.tries, result.tries, strict=True):
                some = self.values.setdefault(request.rid, {})
                some.update(enumerate(values.tolist(), start))
            for request in planned.ended:
                self.scheduler.remove(request)
        self.scheduler.assert_consistent()


def expected(pair: Any, prompt: list[int], paths: list[list[int]]) -> list[float]:
    values = []
    for path in paths:
        before = [*prompt, *path[:-1]]
        values.append(float(pair.logprobs(before)[-1, path[-1]]) if before else float("nan"))
    return values


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("step_tokens", [7, 512])
def test_equals_a_forward_over_each_path(
    pair_of: Callable[[str], Any], name: str, step_tokens: int
) -> None:
    pair = pair_of(name)
    paths, message = tree()
    parents = np.frombuffer(message.parents, np.int32)
    order = np.argsort(parents, kind="stable")
    prompts = {1: [2 + i * 7 % 90 for i in range(23)], 2: [3], 3: []}
    scoring = Scoring(pair.ours, step_tokens)
    for rid, prompt in prompts.items():
        scoring.add(rid, prompt, message)
    scoring.run()
    if step_tokens == 512:
        assert scoring.steps == 1, "prefixes and trees of all in one pass"
    for rid, prompt in prompts.items():
        want = np.array(expected(pair, prompt, paths))[order]
        first = 0 if prompt else int((parents < 0).sum())
        found = scoring.values[rid]
        assert sorted(found) == list(range(first, len(paths)))
        have = torch.tensor([found[i] for i in sorted(found)])
        assert torch.allclose(have, torch.tensor(want[first:], dtype=torch.float32), atol=1e-3)


@pytest.mark.parametrize("most", [3, 1 << 20])
def test_logits_are_made_in_pieces(
    pair_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Never more rows of them at once than fit, and the values are the same."""
    pair = pair_of("qwen2")
    paths, message = tree()
    made: list[int] = []
    logits = pair.ours._decoder.logits

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        made.append(len(hidden))
        return logits(hidden)

    monkeypatch.setattr("ramet.runtime.model.host_runner.LOGITS_BYTES", most * 4 * 131)
    monkeypatch.setattr(pair.ours._decoder, "logits", counted)
    scoring = Scoring(pair.ours, 512)
    scoring.add(1, [5, 6, 7], message)
    scoring.run()
    inner = len(set(np.frombuffer(message.parents, np.int32).tolist()))
    assert sum(made) == inner, "logits of what has children, and of the prompt's end"
    assert max(made) == min(most, inner)
    order = np.argsort(np.frombuffer(message.parents, np.int32), kind="stable")
    want = np.array(expected(pair, [5, 6, 7], paths))[order]
    assert [scoring.values[1][i] for i in range(len(paths))] == pytest.approx(want, abs=1e-3)
