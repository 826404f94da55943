"""Tiny models, and a loop that drives a runner without scheduler or tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from ramet.runtime.model.config import ModelConfig
from ramet.runtime.model.host_runner import HostRunner
from ramet.runtime.protocol.messages import EngineSampling
from ramet.runtime.scheduler.batch import FROM_DEVICE, NewRow, StepBatch


@dataclass
class Request:
    """One prompt on its way, and all that was learned about it."""

    prompt: list[int]
    max_new: int
    sampling: EngineSampling
    row: int = 0
    slots: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    done: int = 0
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    tops: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """(ids, values) for each prompt position from the second on, then for each sample."""
    bad: list[bool] = field(default_factory=list)
    known: bool = False
    allowed: Callable[[int], list[int]] | None = None
    """From how many tokens there are to those that may come next."""

    @property
    def decoding(self) -> bool:
        return bool(self.output)

    @property
    def finished(self) -> bool:
        return len(self.output) >= self.max_new or bool(
            self.output and self.output[-1] in self.sampling.stop_ids
        )


class Driver:
    """Runs requests to their end, ``chunk`` prompt tokens a step at most, decodes first."""

    def __init__(
        self,
        runner: HostRunner,
        *,
        chunk: int = 1 << 30,
        top: int = 0,
        scatter: bool = False,
        scores: bool = True,
    ) -> None:
        self.runner, self.chunk, self.top, self.scores = runner, chunk, top, scores
        free = np.arange(1, runner.num_slots)
        self.free = np.random.default_rng(0).permutation(free) if scatter else free
        self.used = 0

    def run(self, requests: list[Request]) -> list[Request]:
        for row, request in enumerate(requests):
            size = len(request.prompt) + request.max_new
            request.row = row
            request.slots = self.free[self.used : self.used + size].astype(np.int64)
            self.used += size
        while live := [r for r in requests if not r.finished]:
            self.step(live)
        return requests

    def step(self, live: list[Request]) -> None:
        items = [(r, 1) for r in live if r.decoding]
        num_decodes, budget = len(items), self.chunk
        for request in live:
            take = min(budget, len(request.prompt) - request.done)
            if not request.decoding and take:
                items.append((request, take))
                budget -= take
        batch = self.batch(items, num_decodes)
        ticket = self.runner.launch(batch)
        if len(batch.masked):
            rows = self.runner.mask_rows(len(batch.masked))
            rows[:] = 0
            for row, at in zip(rows, batch.masked.tolist()):
                request = items[batch.samples[at]][0]
                assert request.allowed is not None
                for token in request.allowed(len(request.output)):
                    row.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
            ticket.mask(rows, np.arange(len(rows), dtype=np.int32))
        result = ticket.result()
        spans = iter(zip(batch.prompt_logprobs, result.prompt_logprobs))
        for (item, _, _), values in spans:
            request = items[item][0]
            request.prompt_logprobs += values.values.tolist()
            if values.top_ids is not None:
                request.tops += list(zip(values.top_ids, values.top_values))
        for at, item in enumerate(batch.samples.tolist()):
            request = items[item][0]
            request.output.append(int(result.tokens[at]))
            request.bad.append(bool(result.bad[at]))
            if result.logprobs is not None:
                request.logprobs.append(float(result.logprobs[at]))
            if result.top_ids is not None:
                request.tops.append((result.top_ids[at], result.top_values[at]))

    def batch(self, items: list[tuple[Request, int]], num_decodes: int) -> StepBatch:
        q_lens = [n for _, n in items]
        kv_lens = [r.done + n for r, n in items]
        ids, slots, samples, new, spans, targets = [], [], [], [], [], []
        for item, (request, n) in enumerate(items):
            begin = request.done
            request.done += n
            slots.append(request.slots[begin : request.done])
            ids.append([FROM_DEVICE] if request.decoding else request.prompt[begin : begin + n])
            if not request.known:
                request.known = True
                none = np.zeros(0, np.int32)
                prompt = np.array(request.prompt, np.int32)
                new.append(NewRow(request.row, request.sampling, prompt, none, none))
            if request.done >= len(request.prompt):
                samples.append(item)
            first, last = max(1, begin + 1), min(request.done + 1, len(request.prompt))
            if self.scores and not request.decoding and last > first:
                spans.append((item, first, last))
                targets.append(np.array(request.prompt[first:last], np.int32))
        return StepBatch(
            rows=np.array([r.row for r, _ in items], np.int32),
            q_lens=np.array(q_lens, np.int32),
            kv_lens=np.array(kv_lens, np.int32),
            ids=np.concatenate(ids).astype(np.int32),
            slots=np.concatenate(slots),
            samples=np.array(samples, np.int32),
            steps=np.array([len(items[i][0].output) for i in samples], np.int32),
            new_rows=new,
            prompt_logprobs=spans,
            targets=targets,
            want_logprobs=True,
            top_logprobs=self.top,
            num_decodes=num_decodes,
            masked=np.flatnonzero([items[i][0].allowed is not None for i in samples]),
        )


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other are slow where other tests or builds run as well."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def driver() -> type[Driver]:
    return Driver


@pytest.fixture(scope="session")
def request_of() -> Callable[..., Request]:
    def make(prompt: list[int], max_new: int = 1, **sampling: Any) -> Request:
        return Request(prompt, max_new, EngineSampling(max_new_tokens=max_new, **sampling))

    return make


def _sizes(**more: Any) -> dict[str, Any]:
    return {
        "hidden_size": 96,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 131,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }


def _llama3_rope() -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _sizes()),
    "llama-tied-llama3": (
        "Llama",
        _sizes(tie_word_embeddings=True, rope_parameters=_llama3_rope()),
    ),
    "llama-biases": ("Llama", _sizes(attention_bias=True, mlp_bias=True)),
    "mistral-window": ("Mistral", _sizes(sliding_window=7)),
    "qwen2": ("Qwen2", _sizes()),
    "qwen3": ("Qwen3", _sizes(tie_word_embeddings=True)),
    "gemma3": (
        "Gemma3",
        _sizes(
            sliding_window=7,
            query_pre_attn_scalar=24,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    "gemma3-capped": (
        "Gemma3",
        _sizes(
            sliding_window=7,
            final_logit_softcapping=3.0,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        ),
    ),
}


@dataclass
class Pair:
    """The same random weights in transformers and in a runner, float32."""

    theirs: Any
    ours: HostRunner

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """[n, V] of transformers, one full forward."""
        with torch.no_grad():
            logits = self.theirs(torch.tensor([tokens])).logits[0]
        return logits.float().log_softmax(-1)


@pytest.fixture(scope="session")
def pair_of() -> Callable[[str], Pair]:
    made: dict[str, Pair] = {}

    def make(name: str) -> Pair:
        if name not in made:
            made[name] = _make_pair(*FAMILIES[name])
        return made[name]

    return make


def _make_pair(family: str, settings: dict[str, Any]) -> Pair:
    import transformers

    config_class = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, config_class)(**settings)
    config._attn_implementation = "eager"
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Wide enough that every part matters; norms and biases away from their neutral values.
            weight.normal_(0.0, 0.3 if weight.dim() == 1 else 0.15)
            if "norm" in name and family != "Gemma3":
                weight.add_(1.0)
    ours = HostRunner(
        ModelConfig.from_hf({**config.to_dict(), "architectures": [f"{family}ForCausalLM"]}),
        model.state_dict().items(),
        dtype=torch.float32,
        num_slots=600,
        max_rows=8,
        context_length=128,
    )
    return Pair(model, ours)


@pytest.fixture(params=sorted(FAMILIES))
def pair(request: pytest.FixtureRequest, pair_of: Callable[[str], Pair]) -> Pair:
    return pair_of(request.param)
