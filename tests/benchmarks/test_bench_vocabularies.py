"""Vocabularies that benchmarks write for models without a tokenizer."""

from __future__ import annotations

import base64
import json

import pytest
from ramet.runtime.gateway.tokenizer import Tokenizer
from ramet.runtime.model.store import resolve

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 2048,
}


def test_a_made_up_vocabulary_cuts_its_own_tokens(bench_module, tmp_path):
    vocabularies = bench_module("vocabularies")
    tokens, merges = vocabularies.made_up(2000)
    assert len(tokens) == len(set(tokens)) == 2000
    config = tmp_path / "shape.json"
    config.write_text(json.dumps(CONFIG))
    vocabularies.write_model(tmp_path, config, tokens, merges)
    config.unlink()
    tokenizer = Tokenizer.from_files(resolve(str(tmp_path)))
    assert tokenizer.bytes_table[:2000] == tokens
    assert tokenizer.eos_ids == (2001,)
    assert tokenizer.vocab_size == 2048
    text = "the rest is éñ 漢字 {}"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    words = [token.decode() for token in tokens[256:] if token.isalpha()]
    assert sum(len(tokenizer.encode(word)) == 1 for word in words) > len(words) // 2


def test_a_vocabulary_must_fit_the_model(bench_module, tmp_path):
    vocabularies = bench_module("vocabularies")
    config = tmp_path / "shape.json"
    config.write_text(json.dumps(CONFIG))
    with pytest.raises(ValueError, match="2048"):
        vocabularies.write_model(tmp_path, config, *vocabularies.made_up(2047))


def test_ranks_become_merges(bench_module, tmp_path):
    """The two parts of a token are what its bytes were when only those two were left."""
    made = [b"a", b"b", b"c", b"ab", b"bc", b"abc", b"abab"]
    path = tmp_path / "tokens.tiktoken"
    path.write_bytes(
        b"\n".join(base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(made))
    )
    tokens, merges = bench_module("vocabularies").from_tiktoken(path)
    assert tokens == made
    assert merges == [(b"a", b"b"), (b"b", b"c"), (b"ab", b"c"), (b"ab", b"ab")]
