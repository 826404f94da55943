"""A step launched on a device: samples that are on their way, or wait for their masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from ..scheduler.batch import IntArray, PositionLogprobs, StepResult, TrieChunk
from .sampler import Sampled
from .trie_steps import split_tries

Scored = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Log-probs of prompt tokens, and the top ids and log-probs beside them."""


@dataclass(slots=True)
class DeviceTicket:
    """A launched step: its samples are on their way to pinned host memory."""

    event: torch.cuda.Event
    sampled: Sampled
    count: int
    scored: list[Scored]
    spans: list[int]
    tries: list[TrieChunk] = field(default_factory=list[TrieChunk])
    trie_values: list[torch.Tensor] = field(default_factory=list[torch.Tensor])

    def mask(self, rows: IntArray, of: IntArray) -> None:
        """Nothing: this step has sampled."""

    def ready(self) -> bool:
        return self.event.query()

    def result(self) -> StepResult:
        self.event.synchronize()
        sampled, count = self.sampled, self.count
        result = StepResult(
            tokens=sampled.ids.numpy()[:count].astype(np.int32, copy=False),
            bad=sampled.bad.numpy()[:count].astype(np.bool_, copy=False),
        )
        if sampled.logprobs is not None:
            result.logprobs = sampled.logprobs.numpy()
        if sampled.top_ids is not None and sampled.top_logprobs is not None:
            result.top_ids = sampled.top_ids.numpy()
            result.top_values = sampled.top_logprobs.numpy()
        if self.scored:
            result.prompt_logprobs = _positions(self.scored, self.spans)
        if self.tries:
            values = torch.cat(self.trie_values).numpy()
            result.tries = split_tries(self.tries, values)
        return result


class MaskedTicket:
    """A launched step whose samples wait for masks."""

    def __init__(self, sample: Callable[[int, IntArray], DeviceTicket]) -> None:
        self._sample = sample
        self._ticket: DeviceTicket | None = None

    def mask(self, rows: IntArray, of: IntArray) -> None:
        with torch.inference_mode():
            self._ticket = self._sample(len(rows), of)

    def ready(self) -> bool:
        return self._ticket is not None and self._ticket.ready()

    def result(self) -> StepResult:
        assert self._ticket is not None, "the step waits for its masks"
        return self._ticket.result()


def _positions(scored: list[Scored], spans: list[int]) -> list[PositionLogprobs]:
    cuts = np.cumsum(spans)[:-1]
    values = np.split(torch.cat([s[0] for s in scored]).numpy(), cuts)
    found = [PositionLogprobs(v) for v in values]
    if scored[0][1] is not None:
        ids = np.split(torch.cat([s[1] for s in scored if s[1] is not None]).numpy(), cuts)
        top = np.split(torch.cat([s[2] for s in scored if s[2] is not None]).numpy(), cuts)
        for part, part_ids, part_top in zip(found, ids, top):
            part.top_ids, part.top_values = part_ids, part_top
    return found
