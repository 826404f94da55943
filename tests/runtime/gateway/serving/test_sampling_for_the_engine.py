"""What the engine's columns hold is what users may ask for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ramet.runtime.engine.submission import check_sampling
from ramet.runtime.gateway.engine_sampling import resolve
from ramet.runtime.protocol.sampling import sampling_from

TOKENIZER = SimpleNamespace(vocab_size=100, eos_ids=(2,))


@pytest.mark.parametrize(("asked", "told"), [(1 << 62, 100), (100, 100), (7, 7), (-1, -1), (0, -1)])
def test_a_top_k_beyond_the_vocabulary_is_the_vocabulary(asked, told):
    sampling = resolve(sampling_from({"top_k": asked}), 1, 10, 50, TOKENIZER)
    assert sampling.top_k == told
    check_sampling(sampling, TOKENIZER.vocab_size)


def test_lengths_and_seeds_beyond_all_bounds_are_made_to_fit():
    params = sampling_from({"min_new_tokens": 1 << 40, "seed": -(1 << 63)})
    sampling = resolve(params, -(1 << 63), 10, 50, TOKENIZER)
    assert (sampling.max_new_tokens, sampling.min_new_tokens) == (40, 40)
    check_sampling(sampling, TOKENIZER.vocab_size)
