"""Tokens of bytes and bytes to tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ramet.runtime.grammar.spec import Spec
from ramet.runtime.grammar.vocabulary import Vocabulary
from ramet.runtime.protocol.errors import GrammarError


def test_of_a_tokenizer(real, tokenizer):
    assert real.size == 49_152
    assert real.words == 1_536
    assert real.eos_ids == tokenizer.eos_ids
    assert all(real.tokens[i] == b"" for i in tokenizer.special_ids)
    wide = Vocabulary.from_tokenizer(tokenizer, 49_200)
    assert wide.size == 49_200
    assert wide.tokens[-1] == b""
    assert wide.fingerprint != real.fingerprint
    assert real.fingerprint == Vocabulary.from_tokenizer(tokenizer).fingerprint


def test_text_becomes_the_models_own_tokens(real, tokenizer):
    for text in ('{"name":"', " hello world", "naïve 日本 😀", "<|im_end|>", "12345"):
        ids = real.encode(text.encode())
        assert b"".join(real.tokens[i] for i in ids) == text.encode()
    assert real.encode(b'{"name":"') == tokenizer.encode('{"name":"', special=False)
    assert real.encode(b"") == []


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=12))
def test_tokens_join_to_the_bytes(real, data):
    try:
        ids = real.encode(data)
    except GrammarError:
        lacking = set(range(256)) - {t[0] for t in real.tokens if len(t) == 1}
        assert lacking & set(data)
        return
    assert b"".join(real.tokens[i] for i in ids) == data


def test_a_tokenizer_that_changes_text_is_not_believed():
    tokens = [b"a", b"b", b"ab"]
    vocabulary = Vocabulary(tokens, encoder=lambda text: [0 for _ in text])
    assert vocabulary.encode(b"aa") == [0, 0]
    assert vocabulary.encode(b"ab") == [2]
    assert Vocabulary(tokens, encoder=lambda text: [7]).encode(b"ba") == [1, 0]


def test_ids_that_end_are_no_text():
    vocabulary = Vocabulary([b"a", b"</s>"], eos_ids=[1, 1, 5])
    assert vocabulary.eos_ids == (1,)
    assert vocabulary.tokens == [b"a", b""]


def test_specs_that_mean_the_same_have_one_key():
    same = [Spec.of("json_schema", {"a": 1, "b": [2]}), Spec("json_schema", '{"a":1, "b":[ 2]}')]
    assert len({spec.key for spec in same}) == 1
    others = [
        Spec.of("json_schema", {"b": [2], "a": 1}),
        Spec.of("json_schema", {"a": 1, "b": [2]}, "flexible"),
        Spec.of("regex", '{"a":1,"b":[2]}'),
        Spec.of("choice", ["a", "b"]),
        Spec.of("choice", ("b", "a")),
        Spec("json_schema", "{broken"),
    ]
    assert len({spec.key for spec in [*same, *others]}) == 7


@pytest.mark.parametrize("bad", [{1, 2}, object(), float("nan")])
def test_what_is_no_json(bad):
    with pytest.raises(GrammarError):
        Spec.of("json_schema", {"const": bad})
