"""`select` on the real model: every score is that of one forward over the tokens of prompt and
choice together, from where they part; and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ramet as rt
import torch

CLOSE = 1e-3
MODEL = "smollm2-135m-instruct"
CITIES = [
    "Paris",
    "London",
    "Berlin",
    "Madrid",
    "Rome",
    "Vienna",
    "Prague",
    "Warsaw",
    "Lisbon",
    "Dublin",
    "Athens",
    "Oslo",
    "Helsinki",
    "Stockholm",
    "Copenhagen",
    "Brussels",
    "Amsterdam",
    "Budapest",
    "Bucharest",
    "Sofia",
]


@rt.function
def pick(s: Any, prompt: str, choices: list[str], **options: Any) -> None:
    s += prompt
    s += rt.select("best", choices, **options)


@pytest.fixture(scope="module")
def forward() -> Callable[[list[int]], torch.Tensor]:
    """Log-probs [n, V] after each of n tokens, by transformers in float32."""
    import transformers
    from ramet.runtime.model import store
    from ramet.runtime.model.config import ModelConfig
    from ramet.runtime.model.loader.weights import load_weights

    files = store.resolve(MODEL)
    ours = ModelConfig.load(files)
    settings = transformers.LlamaConfig(
        hidden_size=ours.hidden_size,
        intermediate_size=ours.ffn_size,
        num_hidden_layers=ours.num_layers,
        num_attention_heads=ours.num_heads,
        num_key_value_heads=ours.num_kv_heads,
        head_dim=ours.head_dim,
        vocab_size=ours.vocab_size,
        rms_norm_eps=ours.rms_eps,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": ours.rope.theta},
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(settings).float().eval()
    weights = dict(load_weights(files, ours, torch.float32))
    missing = model.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()

    def run(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)

    return run


def common(rows: list[list[int]]) -> int:
    shared = 0
    while all(len(row) > shared for row in rows) and len({row[shared] for row in rows}) == 1:
        shared += 1
    return shared


def check(runtime: Any, forward: Any, prompt: str, choices: list[str]) -> Any:
    """Scores of the exact boundary; returns the state."""
    state = pick.run(prompt, choices, backend=runtime)
    meta = state.get_meta_info("best")
    encode = runtime.tokenizer.encode
    whole = [encode(prompt + choice) for choice in choices]
    start = common([encode(prompt), *whole])
    means = []
    for ids, choice, entries, mean in zip(
        whole,
        choices,
        meta["input_token_logprobs"],
        meta["normalized_prompt_logprobs"],
        strict=True,
    ):
        assert [token for _, token, _ in entries] == ids[start:]
        logprobs = forward(ids)
        want = [float(logprobs[i - 1, ids[i]]) if i else 0.0 for i in range(start, len(ids))]
        values = [value or 0.0 for value, _, _ in entries]
        assert values == pytest.approx(want, abs=CLOSE)
        left, holding = len(choice.encode()), 0
        while left > 0:
            holding += 1
            left -= len(runtime.tokenizer.token_bytes(ids[-holding]))
        assert mean == pytest.approx(sum(want) / holding, abs=CLOSE)
        means.append(sum(want) / holding)
    best = max(range(len(choices)), key=means.__getitem__)
    if sorted(means)[-1] - sorted([*means, -1e9])[-2] > CLOSE:
        assert state["best"] == choices[best]
    assert state.text() == prompt + state["best"]
    return state


@pytest.mark.parametrize(
    ("prompt", "choices"),
    [
        ("The capital of France is", [" Paris", " London", " Berlin"]),
        ("The capital of France is ", ["Paris", "London", "Berlin"]),
        ("The answer is unti", ["l tomorrow", "tled", "dy", "mely, as ever"]),
        ("I like", [" apples", " apples and pears", " apples and pears", " app"]),
        ("def f(x):\n    return", [" x", " x + 1", "\n", " None  ", "\tx"]),
        ("Ein schöner Gruß aus Kö", ["ln", "nigsberg", "öln", "penhagen 😀"]),
        ("今日は", ["良い天気", "良い", "雨", "🌧️"]),
        ("1 + 1 = ", ["2", "3", "11", "2.0"]),
    ],
    ids=["plain", "space", "inside a word", "prefixes", "blanks", "umlauts", "cjk", "digits"],
)
def test_scores_are_those_of_the_text_as_it_is_cut(
    runtime: Any, forward: Any, prompt: str, choices: list[str]
) -> None:
    check(runtime, forward, prompt, choices)


def test_twenty_choices_compute_little_more_than_their_tree(
    cold: Any, forward: Any, settled: Any
) -> None:
    """The tree: the prompt, then each choice's tokens, what they share once."""
    prompt = "Q: Name a capital of Europe.\n" * 8 + "A: The capital city that I like best is"
    choices = [f" the city of {city}" for city in CITIES]
    encode = cold.tokenizer.encode
    nodes = {tuple(row[:end]) for choice in choices if (row := encode(prompt + choice))
             for end in range(1, len(row) + 1)}  # fmt: skip
    before = settled(cold)["computed_tokens"]
    state = check(cold, forward, prompt, choices)
    info = settled(cold)
    assert info["computed_tokens"] - before < 1.2 * len(nodes)
    # Again: all of the prompt but its last token is there, and no leaf is ever computed.
    before = info["computed_tokens"]
    pick.run(prompt, choices, backend=cold)
    assert settled(cold)["computed_tokens"] - before < len(nodes) - len(encode(prompt))
    assert state.get_meta_info("best")["cached_tokens"] == 0


def test_many_with_one_prompt_at_once(cold: Any, settled: Any) -> None:
    """They share the prompt, and what is computed of it is computed once."""
    prompt = "Once upon a time there was a king who had three daughters. " * 12
    size = len(cold.tokenizer.encode(prompt))
    sets = [[f" {name} {i}" for name in ("One", "Two", "Three")] for i in range(8)]
    before = settled(cold)["computed_tokens"]
    states = pick.run_batch([{"prompt": prompt, "choices": s} for s in sets], backend=cold)
    computed = settled(cold)["computed_tokens"] - before
    assert computed < size + 8 * 3 * 4
    for state, choices in zip(states, sets):
        alone = pick.run(prompt, choices, backend=cold)
        assert alone["best"] == state["best"]
        one, other = (s.get_meta_info("best")["normalized_prompt_logprobs"] for s in (alone, state))
        assert one == pytest.approx(other, abs=1e-4)


def test_five_hundred_choices(runtime: Any, settled: Any) -> None:
    choices = [f" number {i}" for i in range(499)] + [" Paris"]
    before = settled(runtime)["computed_tokens"]
    prompt = "The capital of France is"
    state = pick.run(prompt, choices, backend=runtime)
    computed = settled(runtime)["computed_tokens"] - before
    assert state["best"] == " Paris"
    meta = state.get_meta_info("best")
    assert len(meta["normalized_prompt_logprobs"]) == 500
    # Of " number 123" only the last digit is a leaf.
    assert computed < 70
    few = pick.run(prompt, choices[::100], backend=runtime).get_meta_info("best")
    assert meta["normalized_prompt_logprobs"][::100] == pytest.approx(
        few["normalized_prompt_logprobs"], abs=1e-4
    )


def test_a_choice_of_two_thousand_tokens(cold: Any, settled: Any) -> None:
    """It is right, what follows it need not compute it again, and one that is too long says so."""
    long = " once more" * 1000
    start = "Say it again:"
    assert 2000 <= len(cold.tokenizer.encode(long)) < 2100

    @rt.function
    def program(s: Any) -> None:
        s += start
        s += rt.select("best", [long, " xqzw jjkq"])
        s += " and"
        s += rt.gen("more", max_tokens=1)

    state = program.run(backend=cold, temperature=0.0)
    assert state["best"] == long
    assert state.get_meta_info("more")["cached_tokens"] >= 2000
    scored = cold.generate(
        start + long,
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=len(cold.tokenizer.encode(start)),
    )
    values = [value for value, _, _ in scored["meta_info"]["input_token_logprobs"]]
    found = [value for value, _, _ in state.get_meta_info("best")["input_token_logprobs"][0]]
    assert found == pytest.approx(values, abs=CLOSE)
    with pytest.raises(rt.ContextLengthError, match="choice 1"):
        pick.run(start, [" no", " once more" * 5000], backend=cold)["best"]
    settled(cold)


@pytest.fixture(scope="module")
def without_tree() -> Iterator[Any]:
    settings = {"dtype": "float32", "max_total_tokens": 256, "random_seed": 1}
    with rt.Runtime(MODEL, disable_radix_cache=True, **settings) as runtime:
        yield runtime


@pytest.mark.parametrize(
    "method",
    [
        rt.token_length_normalized,
        rt.greedy_token_selection,
        rt.unconditional_likelihood_normalized,
    ],
)
def test_without_a_tree_and_in_little_memory_all_is_the_same(
    runtime: Any, without_tree: Any, method: Any
) -> None:
    """More choices than the memory holds at once, where nothing is shared between requests."""
    prompt = "The capital of France is"
    choices = [f" {city}, which is where {other} lies" for city in CITIES for other in CITIES[:4]]
    small = pick.run(prompt, choices, choices_method=method, backend=without_tree)
    large = pick.run(prompt, choices, choices_method=method, backend=runtime)
    one, other = small.get_meta_info("best"), large.get_meta_info("best")
    assert one["normalized_prompt_logprobs"] == pytest.approx(
        other["normalized_prompt_logprobs"], abs=1e-4
    )
    assert small["best"] == large["best"]
    pages = without_tree.server_info()["pages"]
    assert pages["free"] == pages["total"]


def test_after_a_generation_scoring_begins_where_it_ended(runtime: Any, forward: Any) -> None:
    @rt.function
    def program(s: Any) -> None:
        s += "The capital of France is"
        s += rt.gen("x", max_tokens=3)
        s += rt.select("best", ["hold", " the", ", and"])

    state = program.run(backend=runtime, temperature=0.0, return_logprob=True)
    generated = [token for _, token, _ in state.get_meta_info("x")["output_token_logprobs"]]
    before = [*runtime.tokenizer.encode("The capital of France is"), *generated]
    rows = state.get_meta_info("best")["input_token_logprobs"]
    for choice, entries in zip(["hold", " the", ", and"], rows, strict=True):
        tokens = [token for _, token, _ in entries]
        assert tokens == runtime.tokenizer.encode(choice)
        logprobs = forward([*before, *tokens])
        places = range(len(before) - 1, len(before) - 1 + len(tokens))
        want = [float(logprobs[place, token]) for place, token in zip(places, tokens)]
        assert [value for value, _, _ in entries] == pytest.approx(want, abs=CLOSE)
