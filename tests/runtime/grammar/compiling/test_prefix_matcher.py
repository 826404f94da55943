"""Outputs that begin with given bytes: which tokens may come, and that no way is a dead end."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ramet.runtime.grammar.automaton_backend import AutomatonBackend
from ramet.runtime.grammar.llguidance_backend import LLGuidanceBackend
from ramet.runtime.grammar.outlines_backend import OutlinesBackend
from ramet.runtime.grammar.prefix_matcher import PrefixGrammar
from ramet.runtime.grammar.routing import route
from ramet.runtime.grammar.spec import Spec
from ramet.runtime.grammar.vocabulary import Vocabulary
from ramet.runtime.protocol import GrammarError

PIECES = [b"a", b"b", b"ab", b"abc", b"ba", b"b", b"", b"\xc3", b"\xa9", b"\xc3\xa9", b"\xff\xffa"]


def allowed(matcher, vocabulary):
    row = np.full(vocabulary.words, 0x5A5A5A5A, np.int32)  # what was in it must not matter
    matcher.fill(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")[: vocabulary.size]
    return set(np.flatnonzero(bits).tolist())


def may_come(vocabulary, rest):
    """By definition, where every byte is a token."""
    return {
        i
        for i, data in enumerate(vocabulary.tokens)
        if data and (data.startswith(rest) or rest.startswith(data))
    }


byte_tokens = [bytes((byte,)) for byte in b"abc\xc3\xa9\xff"]
texts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map(b"".join)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(byte_tokens), max_size=5).map(b"".join), max_size=40),
    texts.filter(bool),
    st.randoms(use_true_random=False),
)
def test_a_mask_is_what_the_bytes_say_all_the_way(more, prefix, draw):
    tokens = [*byte_tokens, *more, b""]
    draw.shuffle(tokens)
    end = tokens.index(b"")
    vocabulary = Vocabulary(tokens, size=len(tokens) + 3, eos_ids=(end,))
    matcher = PrefixGrammar(vocabulary).matcher(prefix)
    written = b""
    while len(written) < len(prefix):
        assert matcher.rest == prefix[len(written) :]
        assert not matcher.can_end()
        may = may_come(vocabulary, matcher.rest)
        assert allowed(matcher, vocabulary) == may
        for other in draw.sample(range(vocabulary.size), 5):
            twin = matcher.fork()
            assert twin.accept(other) == (other in may)
        token = draw.choice(sorted(may))
        assert matcher.accept(token)
        written += vocabulary.tokens[token]
    assert written.startswith(prefix)
    assert matcher.can_end()
    assert not matcher.is_done()
    assert allowed(matcher, vocabulary) == set(range(vocabulary.size))
    assert matcher.accept(end)


@settings(max_examples=200, deadline=None)
@given(st.sets(texts.filter(bool), min_size=1, max_size=12), texts.filter(bool), st.data())
def test_no_token_leads_to_where_none_may_follow(tokens, prefix, data):
    """Also in vocabularies that lack single bytes."""
    vocabulary = Vocabulary(sorted(tokens))

    def ways(place):
        rest = prefix[place:]
        return not rest or any(
            token.startswith(rest) or (rest.startswith(token) and ways(place + len(token)))
            for token in tokens
        )

    if not ways(0):
        with pytest.raises(GrammarError, match="no tokens"):
            PrefixGrammar(vocabulary).matcher(prefix)
        return
    matcher = PrefixGrammar(vocabulary).matcher(prefix)
    place = 0
    while place < len(prefix):
        here = allowed(matcher, vocabulary)
        want = {
            i
            for i in may_come(vocabulary, prefix[place:])
            if place + len(vocabulary.tokens[i]) >= len(prefix)
            or ways(place + len(vocabulary.tokens[i]))
        }
        assert here == want
        assert here
        token = data.draw(st.sampled_from(sorted(here)))
        assert matcher.accept(token)
        place += len(vocabulary.tokens[token])


def test_undoing_goes_back_and_no_further():
    vocabulary = Vocabulary([b"a", b"b", b"c", b"abc"])
    matcher = PrefixGrammar(vocabulary).matcher(b"abca")
    assert [matcher.accept(token) for token in (0, 1, 2)] == [True] * 3
    twin = matcher.fork()
    matcher.rollback(2)
    assert matcher.rest == b"bca"
    assert twin.rest == b"a"
    assert allowed(matcher, vocabulary) == {1}
    with pytest.raises(ValueError, match="cannot undo 2 of 1"):
        matcher.rollback(2)
    matcher.rollback(1)
    assert allowed(matcher, vocabulary) == {0, 3}
    assert matcher.accept(3)
    assert matcher.forced_tokens([]) == []


def test_ids_that_share_their_bytes_may_all_come():
    vocabulary = Vocabulary([b"x", b"ab", b"ab", b"abz", b"a", b"b", b"a"])
    matcher = PrefixGrammar(vocabulary).matcher(b"ab")
    assert allowed(matcher, vocabulary) == {1, 2, 3, 4, 6}
    assert not matcher.accept(-1)
    assert not matcher.accept(99)


# --- behind a prefix, a grammar -------------------------------------------------------------------

ALPHABET = [*(bytes((c,)) for c in b'abcxyz01 {}":,\n'), b" a", b"ab", b"a{", b'{"', b'":', b"01"]
ALPHABET += [b"x1", b"x a", b"xa", b'x{"a"', b"yz", b" x", b" {", b' {"']

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [0, 1]}},
    "required": ["a"],
    "additionalProperties": False,
}
SPECS = [
    ("regex", "(a|bc){1,3}", r"(a|bc){1,3}"),
    ("choice", '["abc", "ab", "x y"]', r"abc|ab|x y"),
    ("json_schema", json.dumps(SCHEMA), r'\{"a":[01]\}'),
    ("ebnf", 'root ::= "a" root "b" | "x"', "|".join("a" * i + "x" + "b" * i for i in range(11))),
    ("ebnf", 'start: "a" "b"?\n%ignore " "', r" *a *b? *"),
]
CASES = [(LLGuidanceBackend, *spec) for spec in SPECS]
CASES += [(one, *spec) for spec in SPECS[:2] for one in (OutlinesBackend, AutomatonBackend)]


@pytest.mark.parametrize("prefix", ["x", "x ", " ", 'y"{\n', "a", "0"])
@pytest.mark.parametrize(("backend", "kind", "text", "meaning"), CASES)
def test_a_grammar_begins_right_after_the_prefix(backend, kind, text, meaning, prefix):
    spec = Spec(kind, text, prefix=prefix)
    vocabulary = Vocabulary([*ALPHABET, b""], eos_ids=(len(ALPHABET),))
    grammar = backend().compile(spec, vocabulary)
    pattern = re.compile(re.escape(prefix) + f"(?:{meaning})")
    draw = random.Random(5)
    spans = 0
    for _ in range(60):
        matcher, written = grammar.matcher(), b""
        while not matcher.is_done() and len(written) < 20:
            token = draw.choice(sorted(allowed(matcher, vocabulary)))
            assert matcher.accept(token)
            if token == len(ALPHABET):
                break
            before = len(written)
            written += vocabulary.tokens[token]
            spans += before < len(prefix) < len(written)
        if len(written) < 20:
            assert pattern.fullmatch(written.decode()), written
    if prefix in ("x", "x ", " ") and kind != "ebnf":
        assert spans, "no token ever spans the border, though some could"


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8))
def test_any_text_may_be_a_prefix(prefix):
    vocabulary = Vocabulary([*(bytes((byte,)) for byte in range(256)), b""], eos_ids=(256,))
    specs = [("json_schema", '{"const": 1}'), ("regex", "1"), ("ebnf", 'root ::= "1"')]
    for kind, text in specs:
        matcher = LLGuidanceBackend().compile(Spec(kind, text, prefix=prefix), vocabulary).matcher()
        for byte in prefix.encode() + b"1":
            assert byte in allowed(matcher, vocabulary)
            assert matcher.accept(byte)
        assert matcher.is_done()


def test_a_prefix_makes_another_grammar_of_a_spec():
    plain, one, two = (Spec("regex", "a+", prefix=text) for text in ("", "x", "y"))
    assert len({plain.key, one.key, two.key}) == 3
    assert Spec("regex", "a+", prefix="x").key == one.key
    assert Spec("regex", "xa+").key != one.key


def test_what_is_used_a_few_times_gets_no_rows():
    assert route("regex") == ("automaton", "llguidance")
    assert route("regex", prefixed=True) == ("llguidance", "automaton")
    assert route("json_schema", prefixed=True) == ("llguidance",)
    assert route("regex", "outlines", prefixed=True) == ("outlines",)
