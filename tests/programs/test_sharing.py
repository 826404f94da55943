"""What has been computed is not computed again: the ladder of cached tokens, forks, batches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ramet as rt

ONE = {"temperature": 0.0, "max_new_tokens": 1}
LADDER = [((0, 100), 0), ((0, 8000), 100), ((0, 8000), 7999), ((0, 1000), 999), ((0, 8100), 8000)]
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 16,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Random weights that cost next to nothing, with the real model's context and tokenizer."""
    config: Path = tmp_path_factory.mktemp("tiny") / "config.json"
    config.write_text(json.dumps(TINY), "utf-8")
    with rt.Runtime(
        str(config),
        load_format="dummy",
        tokenizer_path="smollm2-135m-instruct",
        dtype="float32",
        max_total_tokens=16384,
    ) as runtime:
        yield runtime


def climb(runtime: Any, scale: int = 1) -> None:
    runtime.flush_cache()
    for (start, end), cached in LADDER:
        ids = list(range(start, end // scale))
        meta = runtime.generate(input_ids=ids, sampling_params=ONE)["meta_info"]
        want = cached // scale if cached not in (7999, 999) else (cached + 1) // scale - 1
        assert meta["cached_tokens"] == want, f"input_ids {start}..{end // scale}"
        assert meta["prompt_tokens"] == len(ids)
        assert meta["completion_tokens"] == 1


def test_ladder_of_cached_tokens(tiny: Any) -> None:
    climb(tiny)
    climb(tiny)  # a flush starts it over


def test_a_tenth_of_the_ladder_on_the_real_model(runtime: Any) -> None:
    climb(runtime, scale=10)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ladder_on_the_real_model(runtime: Any) -> None:
    climb(runtime)


def test_hits_are_counted_by_the_token(tiny: Any) -> None:
    """Sharing has no grain: two prompts that part anywhere share exactly what they share."""
    tiny.flush_cache()
    base = list(range(5000, 5200))
    tiny.generate(input_ids=base, sampling_params=ONE)
    for cut in (1, 15, 16, 17, 63, 64, 65, 131):
        ids = base[:cut] + list(range(7000 + 100 * cut, 7020 + 100 * cut))
        meta = tiny.generate(input_ids=ids, sampling_params=ONE)["meta_info"]
        assert meta["cached_tokens"] == cut


def test_salts_do_not_share(tiny: Any) -> None:
    tiny.flush_cache()
    ids = list(range(300))
    cached = [
        tiny.generate(input_ids=ids, sampling_params=ONE, cache_salt=salt)["meta_info"][
            "cached_tokens"
        ]
        for salt in (None, "a", "b", "a", "b", None)
    ]
    assert cached == [0, 0, 0, 299, 299, 299]


def test_flush_forgets_everything(tiny: Any, settled: Any) -> None:
    tiny.generate(input_ids=list(range(100)), sampling_params=ONE)
    assert settled(tiny)["pages"]["cached"] > 0
    rt.flush_cache(tiny)
    pages = settled(tiny)["pages"]
    assert pages["free"] == pages["total"]


BRANCHES = 16
PREFIX = 1000


@rt.function
def branching(s: Any, prefix: str) -> None:
    s += prefix
    branches = s.fork(BRANCHES)
    for index, branch in enumerate(branches):
        branch += f" Question {index}: what is {index} and {index * 7}?"
        branch += rt.gen("answer", max_tokens=4, ignore_eos=True)
    branches.join()
    s += "".join(s["answer"])


def words(runtime: Any, tokens: int, seed: int) -> str:
    """A text of exactly that many tokens."""
    text = "".join(f" {word}" for word in ("river", "stone", "light", "house")[seed:])
    text = f"Text {seed}." + text * tokens
    ids = runtime.tokenizer.encode(text)[:tokens]
    text = runtime.tokenizer.decode(ids)
    assert len(runtime.tokenizer.encode(text)) == tokens
    return text


@pytest.mark.parametrize("how", ["lazy", "compiled"])
def test_a_fork_computes_its_prefix_once(cold: Any, settled: Any, how: str) -> None:
    """The first time too: siblings wait for the one that computes what they share."""
    prefix = words(cold, PREFIX, 0 if how == "lazy" else 1)
    questions = [f" Question {i}: what is {i} and {i * 7}?" for i in range(BRANCHES)]
    own = sum(len(cold.tokenizer.encode(q)) for q in questions)
    before = cold.server_info()["computed_tokens"]
    program = branching if how == "lazy" else branching.compile()
    state = program.run(prefix=prefix, backend=cold, temperature=0.0)
    assert len(state["answer"]) == BRANCHES
    computed = settled(cold)["computed_tokens"] - before
    assert PREFIX < computed < 1.1 * (PREFIX + own) + BRANCHES * 4
    prefill = computed - BRANCHES * 3  # each branch's first token is sampled by its prefill
    assert prefill <= 1.02 * (PREFIX + own), "something that is shared was computed twice"


def test_equal_prompts_at_once_are_computed_once(cold: Any, settled: Any) -> None:
    ids = [*range(1000, 1199), *range(3000, 3101)]
    before = cold.server_info()["computed_tokens"]
    replies = cold.generate(input_ids=[ids] * 8, sampling_params=ONE)
    assert len({tuple(reply["output_ids"]) for reply in replies}) == 1
    assert settled(cold)["computed_tokens"] - before <= len(ids) + 8


def test_cache_prefills_the_beginning_of_a_program(cold: Any, settled: Any) -> None:
    @rt.function
    def answers(s: Any, question: str) -> None:
        s += "Answer in one word, and never say more than you were asked. " * 8
        s += question
        s += rt.gen("answer", max_tokens=2)

    answers.cache(cold)
    cached = settled(cold)["pages"]["cached"]
    state = answers.run("What is red?", backend=cold, temperature=0.0)
    assert cached > 80
    assert state.get_meta_info("answer")["cached_tokens"] >= cached - 2
