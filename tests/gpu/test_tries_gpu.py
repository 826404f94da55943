"""Continuations scored as a tree on the GPU: the same as on the CPU, and as one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch


def random_paths(seed: int, count: int, longest: int) -> list[list[int]]:
    rng = random.Random(seed)
    stem = [rng.randrange(1000) for _ in range(longest)]
    paths = []
    for _ in range(count):
        size = rng.randint(1, longest)
        shared = rng.randint(0, size)
        paths.append(stem[:shared] + [rng.randrange(1000) for _ in range(size - shared)])
    return paths


def message_of(paths):
    from ramet.runtime.protocol.trie import Trie

    nodes = sorted({tuple(path[:end]) for path in paths for end in range(1, len(path) + 1)})
    number = {node: i for i, node in enumerate(nodes)} | {(): -1}
    tokens = np.array([node[-1] for node in nodes], np.int32)
    parents = np.array([number[node[:-1]] for node in nodes], np.int32)
    order = np.argsort(parents, kind="stable")
    trie = Trie(tokens=tokens.tobytes(), parents=parents.tobytes())
    return trie, [list(nodes[i]) for i in order]


@pytest.fixture(scope="module")
def trie_drive(drive):
    class TrieDriver(drive):
        def add_trie(self, prompt, message):
            from ramet.runtime.protocol.messages import EngineSampling
            from ramet.runtime.scheduler.request import Request
            from ramet.runtime.scheduler.trie import trie_of

            self.next += 1
            trie = trie_of(message, 1000)
            tokens = np.concatenate((np.array(prompt, np.int32), trie.nodes))
            sampling = EngineSampling(max_new_tokens=0)
            request = Request(self.next, b"t", sampling, tokens, len(prompt), trie=trie)
            self.scheduler.add(request)
            return self.next

        def land(self, planned, ticket):
            super().land(planned, ticket)
            for (request, start), values in zip(planned.tries, ticket.result().tries):
                found = self.prompt_logprobs.setdefault(request.rid, [])
                assert start == len(found) or not found
                found.extend(values.tolist())

    return TrieDriver


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "gemma3"])
@pytest.mark.parametrize("step_tokens", [50, 1024])
def test_equals_the_cpu_beside_others(family, step_tokens, make_runner, trie_drive):
    jobs = [
        ([i * 7 % 1000 for i in range(90)], random_paths(1, 20, 6)),
        ([3, 4, 5], random_paths(2, 8, 40)),
        ([], random_paths(3, 6, 9)),
        ([i * 7 % 1000 for i in range(90)], random_paths(4, 60, 3)),
    ]
    found = []
    for on in ("cpu", "cuda"):
        runner = make_runner(family, on=on)
        driver = trie_drive(runner, slots=4096, step_tokens=step_tokens)
        plain = driver.add([i * 11 % 1000 for i in range(70)], 12, logprobs=True)
        driver.step()
        driver.step()
        rids = [driver.add_trie(prompt, message_of(paths)[0]) for prompt, paths in jobs]
        driver.run()
        found.append([driver.prompt_logprobs[rid] for rid in rids] + [driver.logprobs[plain]])
        runner.close()
    for have, want in zip(found[1], found[0], strict=True):
        assert np.allclose(have, want, atol=1e-3)


def test_equals_one_request_for_each(make_runner, trie_drive):
    paths = random_paths(5, 12, 8)
    message, order = message_of(paths)
    prompt = [i * 13 % 1000 for i in range(200)]
    driver = trie_drive(make_runner("qwen2", on="cuda"), slots=4096, step_tokens=512)
    rid = driver.add_trie(prompt, message)
    driver.run()
    alone = [
        driver.add([*prompt, *path], 0, logprobs=True, logprob_start=len(prompt) + len(path) - 1)
        for path in order
    ]
    driver.run()
    want = [driver.prompt_logprobs[one][-1] for one in alone]
    assert np.allclose(driver.prompt_logprobs[rid], want, atol=1e-3)


def test_logits_are_made_in_pieces(make_runner, trie_drive, monkeypatch):
    """Room for ten rows of logits changes nothing."""
    from ramet.runtime.model import device_sampling

    message, order = message_of(random_paths(6, 600, 5))
    values = []
    for rows in (1 << 20, 10):
        monkeypatch.setattr(device_sampling, "LOGITS_BYTES", rows * 12 * 1000)
        driver = trie_drive(make_runner("llama", on="cuda"), slots=4096, step_tokens=2048)
        rid = driver.add_trie([1, 2, 3], message)
        driver.run()
        values.append(driver.prompt_logprobs[rid])
    assert len(values[0]) == len(order)
    assert np.allclose(*values, atol=1e-4)
    assert torch.isfinite(torch.tensor(values)).all()
