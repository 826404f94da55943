"""Runs requests through scheduler and runner in this process, on the GPU or beside it."""

from __future__ import annotations

import numpy as np
import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "/gpu/" in str(item.path):
            item.add_marker(skip)


TINY = {
    "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 1000,
    "num_key_value_heads": 2, "intermediate_size": 256, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "head_dim": 32, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip

FAMILIES = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "head_dim": 64},
    "mistral": {
        "model_type": "mistral", "architectures": ["MistralForCausalLM"], "head_dim": 80,
        "sliding_window": 40,
    },
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "head_dim": 128},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 96},
    "gemma3": {
        "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 32,
        "sliding_window_pattern": 2, "query_pre_attn_scalar": 256, "rope_local_base_freq": 1e4,
        "tie_word_embeddings": True,
    },
}  # fmt: skip


@pytest.fixture(scope="session")
def tiny_config():
    from ramet.runtime.model.config import ModelConfig

    def make(family: str):
        return ModelConfig.from_hf({**TINY, **FAMILIES[family]}, {})

    return make


class Driver:
    """What the engine does, without sockets: plans, launches, reads samples one step late."""

    def __init__(self, runner, *, slots: int, step_tokens=256, rows=8, context=1024, caching=True):
        from ramet.runtime.memory.kv_memory import KVMemory
        from ramet.runtime.scheduler.scheduler import Limits, Scheduler

        self.runner = runner
        self.memory = KVMemory(slots, 16, caching=caching)
        self.scheduler = Scheduler(
            Limits(
                max_rows=rows,
                context_length=context,
                step_tokens=step_tokens,
                prompt_sizes=runner.prompt_sizes,
            ),
            self.memory,
        )
        self.next = 0
        self.flights: list = []
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.prompt_logprobs: dict[int, list[float]] = {}
        self.failed: list = []
        self.steps = 0

    def add(self, prompt, new: int, **sampling) -> int:
        from ramet.runtime.protocol.messages import EngineSampling
        from ramet.runtime.scheduler.request import Request

        self.next += 1
        tokens = np.array(prompt, np.int32)
        sampling = EngineSampling(max_new_tokens=new, **sampling)
        self.scheduler.add(Request(self.next, b"t", sampling, tokens, len(tokens)))
        return self.next

    def step(self) -> bool:
        from ramet.runtime.scheduler.scheduler import MustDrain

        try:
            planned = self.scheduler.plan(drained=not self.flights)
        except MustDrain:
            planned = None
        if planned is not None:
            ticket = self.runner.launch(planned.batch)
            self.flights.append((planned, ticket))
            self.steps += 1
            if len(planned.batch.masked):
                self.mask(planned, ticket)
        if self.flights and (planned is None or len(self.flights) > int(self.runner.asynchronous)):
            self.land(*self.flights.pop(0))
        for request, _ in self.scheduler.failed:
            self.failed.append(request.rid)
        self.scheduler.failed.clear()
        return planned is not None or bool(self.flights)

    def mask(self, planned, ticket) -> None:
        """Rows with a constraint may sample multiples of 7 and 5 in turn."""
        while len(self.flights) > 1:
            self.land(*self.flights.pop(0))
        rows = self.scheduler.rows
        words = self.runner.mask_rows(len(planned.batch.masked))
        words[:] = 0
        for word, at in zip(words, planned.batch.masked.tolist()):
            row = int(planned.rows[at])
            made = int(rows.known[row] - rows.prompt_len[row])
            allowed = np.arange(0, self.runner.vocab_size, 5 if made % 2 else 7)
            np.bitwise_or.at(word.view(np.uint32), allowed // 32, np.uint32(1) << allowed % 32)
        ticket.mask(words, np.arange(len(words), dtype=np.int32))

    def land(self, planned, ticket) -> None:
        result = ticket.result()
        rows = self.scheduler.rows
        for (request, _), found in zip(planned.scored, result.prompt_logprobs):
            self.prompt_logprobs.setdefault(request.rid, []).extend(found.values.tolist())
        for i, (row, epoch) in enumerate(zip(planned.rows.tolist(), planned.epochs.tolist())):
            if rows.epoch[row] != epoch:
                continue
            assert not result.bad[i]
            request = rows.requests[row]
            token = int(result.tokens[i])
            rows.tokens[row, rows.known[row]] = token
            rows.known[row] += 1
            self.tokens.setdefault(request.rid, []).append(token)
            if result.logprobs is not None:
                self.logprobs.setdefault(request.rid, []).append(float(result.logprobs[i]))
            made = rows.known[row] - request.prompt_len
            if token in request.sampling.stop_ids or made >= rows.max_new[row]:
                self.scheduler.remove(request)
        for request in planned.ended:
            if request.row >= 0:
                self.scheduler.remove(request)

    def run(self) -> None:
        while self.step() or not self.scheduler.idle:
            pass
        self.scheduler.assert_consistent()


@pytest.fixture(scope="session")
def drive():
    return Driver


@pytest.fixture(scope="session")
def make_runner(tiny_config):
    from ramet.runtime.model.loader.dummy import dummy_weights

    def make(
        family: str, *, on: str, dtype=torch.float32, slots=4096, rows=8, captured=True, ops=None
    ):
        from ramet.runtime.model.host_runner import HostRunner

        config = tiny_config(family)
        # Drawn on the host, so that both devices get the same; scaled up, so that logits differ.
        weights = [
            (n, t * 4 if t.ndim == 2 else t)
            for n, t in dummy_weights(config, torch.float32, "cpu", 7)
        ]
        if on == "cpu":
            return HostRunner(
                config,
                weights,
                dtype=dtype,
                num_slots=slots + 16,
                max_rows=rows,
                context_length=1024,
            )
        from ramet.runtime.model.device_runner import DeviceRunner

        runner = DeviceRunner(
            config, weights, dtype=dtype, max_rows=rows, context_length=1024,
            device=torch.device("cuda"), ops=ops,
        )  # fmt: skip
        runner.take_memory(slots + 16)
        if captured:
            runner.capture(rows)
        return runner

    return make
