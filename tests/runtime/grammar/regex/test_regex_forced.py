"""Forced bytes as tokens: canonical, never cut where a longer token could go on, the same text
whether they are appended at once or come one by one."""

from __future__ import annotations

import random
import re
import zlib

import numpy as np
import pytest
from ramet.runtime.grammar.automaton_backend import AutomatonBackend
from ramet.runtime.grammar.backend import Refused
from ramet.runtime.grammar.forced import canonical_tokens
from ramet.runtime.grammar.llguidance_backend import LLGuidanceBackend
from ramet.runtime.grammar.outlines_backend import OutlinesBackend
from ramet.runtime.grammar.spec import Spec
from ramet.runtime.grammar.vocabulary import Vocabulary
from ramet.runtime.protocol.errors import GrammarError

BACKENDS = [OutlinesBackend(), AutomatonBackend(), LLGuidanceBackend()]

TASKS = [
    r"\{\"name\": \"(Ada|Adam|Bob)\", \"age\": [0-9]{1,3}, \"tags\": \[(\"[a-c]\"(, \"b\")*)?\]\}",
    r"The answer is (order|orderName|orderId|orders|ordering)\.",
    r"<(b|body|bold)>[a-z ]*</(b|body|bold)>\n",
    r"(霍格沃茨特快列车|霍比特人比尔博)和(日本|中国)人",
    r"int main\(\) \{\n( |  |    )return [0-9]+;\n\}\n\n?",
    r"(Monday|Thursday), (January|June|July|Jan\.) [0-9]{1,2}(st|nd|rd)?, (19|20)[0-9]{2}",
    r"name(: | = |:)\"?(Ada|Adam|Bob)\"?",
    r"https?://(www\.)?example\.(com|org|company)/[a-z]{0,8}",
    r"(😀|😁|👍){1,3} done",
    r"(  )*  \* item [0-9]\n",
    r"I am( not)? (certain|certainly) (that|this) is( n't| not)? (so|sooner)\.",
    r"(Straße|Strasse|STRASSE) [0-9]+ in (Köln|Konstanz)",
]


def choose(ids: list[int], allowed: set[int], salt: int) -> int:
    """Greedy over made-up logits that depend on all ids before."""
    state = zlib.crc32(np.array([salt, *ids], np.int64).tobytes())
    return max(allowed, key=lambda token: (zlib.crc32(token.to_bytes(4, "little"), state), token))


def generate(matcher, vocabulary, salt: int, jump: bool, allowed) -> tuple[list[int], int]:
    """(ids, number of forward passes)."""
    ids: list[int] = []
    steps = 0
    while not matcher.is_done() and len(ids) < 80:
        if jump:
            for token in matcher.forced_tokens(ids[-4:]):
                assert matcher.accept(token)
                ids.append(token)
            if matcher.is_done():
                break
        token = choose(ids, allowed(matcher, vocabulary), salt)
        assert matcher.accept(token)
        ids.append(token)
        steps += 1
    return ids[:80], steps


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_the_same_text_with_and_without_jumps(backend, real, walks):
    saved = total = 0
    for pattern in TASKS:
        grammar = backend.compile(Spec.of("regex", pattern), real)
        for salt in range(4):
            on, few = generate(grammar.matcher(), real, salt, True, walks.allowed)
            off, many = generate(grammar.matcher(), real, salt, False, walks.allowed)
            assert on == off, (pattern, salt)
            saved, total = saved + many - few, total + many
    assert saved > total * 0.15


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_forced_tokens_begin_the_models_own_tokens_of_every_text_that_may_come(
    backend, real, walks
):
    """The rule's purpose: a text's canonical tokens always pass the masks, however it goes on."""
    rng = random.Random(7)
    forced_count = 0
    for pattern in TASKS:
        grammar = backend.compile(Spec.of("regex", pattern), real)
        for _ in range(12):
            text = sample(grammar, real, rng, walks.allowed)
            forced_count += canonical_passes(grammar, real, text, walks.allowed)
    assert forced_count > 500


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_random_regexes_with_a_real_vocabulary(backend, real, random_regexes, walks):
    """What is generated matches, and its canonical tokens would have been let through."""
    regexes, rng = random_regexes(21), random.Random(8)
    texts = 0
    for _ in range(60):
        pattern = regexes.pattern()
        try:
            grammar = backend.compile(Spec.of("regex", pattern), real)
        except (Refused, GrammarError):
            continue
        for _ in range(3):
            text = sample(grammar, real, rng, walks.allowed)
            assert re.fullmatch(pattern, text.decode()), (pattern, text)
            canonical_passes(grammar, real, text, walks.allowed)
            texts += 1
    assert texts > 130


def canonical_passes(grammar, vocabulary: Vocabulary, text: bytes, allowed) -> int:
    """Checks that the model's own tokens of a match pass the masks; how many were forced."""
    ids = vocabulary.encode(text)
    matcher = grammar.matcher()
    at = count = 0
    while at < len(ids):
        forced = matcher.forced_tokens([])
        assert ids[at : at + len(forced)] == forced, text
        count += len(forced)
        assert ids[at] in allowed(matcher, vocabulary), text
        for token in forced or ids[at : at + 1]:
            assert matcher.accept(token)
            at += 1
    assert matcher.can_end()
    return count


def sample(grammar, vocabulary: Vocabulary, rng: random.Random, allowed) -> bytes:
    """A random match, by tokens that need not be the model's own."""
    ends = set(vocabulary.eos_ids)
    while True:
        matcher, data = grammar.matcher(), b""
        while len(data) < 150:
            ids = allowed(matcher, vocabulary)
            if matcher.is_done() or (ids & ends and rng.random() < 0.2):
                return data
            # A byte first, then a token: else the many letters would drown what ends them.
            first = rng.choice(sorted({vocabulary.tokens[i][0] for i in ids - ends}))
            tokens = [i for i in ids - ends if vocabulary.tokens[i][0] == first]
            token = rng.choice(sorted(tokens))
            assert matcher.accept(token)
            data += vocabulary.tokens[token]


def words(*tokens: str) -> Vocabulary:
    return Vocabulary([*(t.encode() for t in tokens), *(bytes((i,)) for i in range(256))])


def text_of(vocabulary: Vocabulary, ids: list[int]) -> list[bytes]:
    return [vocabulary.tokens[i] for i in ids]


def test_trailing_tokens_that_a_longer_one_could_span_are_held_back():
    vocabulary = words("order", "orderName", "the", " order", " orders", "rNa")
    held = text_of(vocabulary, canonical_tokens(vocabulary, b"the order"))
    assert held == [b"the"]  # " orders" may be meant
    nothing_more = canonical_tokens(vocabulary, b"the order", (), lambda more: False)
    assert text_of(vocabulary, nothing_more) == [b"the", b" order"]
    dots = canonical_tokens(vocabulary, b"the order", (), lambda more: more in (b".", b"Name"))
    assert text_of(vocabulary, dots) == [b"the", b" order"]
    into = canonical_tokens(vocabulary, b"the order", (), lambda more: b"Name".startswith(more))
    assert text_of(vocabulary, into) == [b"the"]  # "rNa" begins inside of it


def test_emitted_tokens_are_context_and_never_cut_anew():
    vocabulary = words("ab", "abc", "bc", "c")
    a, ab = vocabulary.ids_of_bytes[b"a"], vocabulary.ids_of_bytes[b"ab"]
    assert text_of(vocabulary, canonical_tokens(vocabulary, b"bc", [a], lambda m: False)) == [b"bc"]
    assert text_of(vocabulary, canonical_tokens(vocabulary, b"c", [ab], lambda m: False)) == [b"c"]


def test_how_bytes_are_cut_depends_on_the_token_before():
    tokens = [b"a", b"b", b"c", b"bc", b"x"]
    cuts = {"abc": [0, 3], "bc": [1, 2], "xbc": [4, 1, 2]}
    vocabulary = Vocabulary(tokens, encoder=cuts.__getitem__)
    assert canonical_tokens(vocabulary, b"bc", [0], lambda m: False) == [3]
    assert canonical_tokens(vocabulary, b"bc", [0, 4], lambda m: False) == [1, 2]
    assert canonical_tokens(vocabulary, b"bc", (), lambda m: False) == [1, 2]


def test_halves_of_characters_are_not_forced_alone():
    vocabulary = words("é", "日")
    lead = vocabulary.ids_of_bytes[b"\xc3"]
    assert canonical_tokens(vocabulary, b"\xc3", (), lambda m: False) == []
    assert canonical_tokens(vocabulary, b"x\xe6\x97", (), lambda m: m == b"\xa5") == [
        vocabulary.ids_of_bytes[b"x"]
    ]
    rest = canonical_tokens(vocabulary, b"\xa9x", [lead], lambda m: False)
    assert text_of(vocabulary, rest) == [b"\xa9", b"x"]
    assert canonical_tokens(vocabulary, b"\xa9x", (), lambda m: False) == []


def test_bytes_that_the_model_has_no_token_for_are_not_forced():
    vocabulary = Vocabulary([b"a", b"b"])
    assert canonical_tokens(vocabulary, b"abc") == []


def test_a_vocabulary_of_characters_forces_all_of_them(letters, walks):
    grammar = walks.compile("(é😀){2}b?", letters)
    forced = grammar.matcher().forced_tokens([])
    assert b"".join(letters.tokens[i] for i in forced).decode() == "é😀é😀"
