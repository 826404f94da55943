"""Matchers on llguidance: ends, undoing, forks, forced tokens, errors that would be silent."""

from __future__ import annotations

import random

import numpy as np
import pytest
from ramet.runtime.grammar import llguidance_backend, llguidance_matcher
from ramet.runtime.grammar.llguidance_backend import LLGuidanceBackend
from ramet.runtime.grammar.spec import Spec
from ramet.runtime.grammar.vocabulary import Vocabulary
from ramet.runtime.protocol.errors import GrammarError

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TASKS = [
    ("json_schema", PERSON),
    ("json_schema", {"enum": ["order", "orderName", "orderId"]}),
    ("json_schema", {"type": "array", "items": PERSON, "minItems": 1, "maxItems": 2}),
    ("json_schema", {"type": "object", "properties": {"first_name": {"const": "é😀"}},
                     "required": ["first_name"], "additionalProperties": False}),
    ("regex", "(yes|yes please|no thank you), [a-z]{1,5}!"),
    ("choice", ["the first", "the second one", "the second"]),
    ("ebnf", 'root ::= "SELECT " name " FROM " name ";"\nname ::= [a-z]{1,4}'),
    ("ebnf", 'root ::= "begin " root " end" | "nothing at all"'),
]  # fmt: skip


def compile_(kind, spec, vocabulary):
    return LLGuidanceBackend().compile(Spec.of(kind, spec), vocabulary)


def allowed(matcher, vocabulary) -> list[int]:
    row = np.full(vocabulary.words, -1, np.int32)
    matcher.fill(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def test_ends_are_taken_where_the_output_is_whole(small):
    matcher = compile_("regex", "a{2}b?", small).matcher()
    first, second = small.eos_ids
    assert not matcher.accept(first)
    assert matcher.accept(ord("a"))
    assert not matcher.can_end()
    assert matcher.accept(ord("a"))
    assert matcher.can_end()
    assert not matcher.is_done()
    assert allowed(matcher, small) == [ord("b"), first, second]
    assert matcher.accept(second)
    assert matcher.is_done()
    assert matcher.can_end()
    assert allowed(matcher, small) == [first, second]
    assert not matcher.accept(first)
    assert not matcher.accept(ord("b"))
    assert matcher.forced_tokens([]) == []
    matcher.rollback(1)
    assert not matcher.is_done()
    assert matcher.accept(ord("b"))
    assert matcher.is_done()
    assert matcher.can_end()
    assert allowed(matcher, small) == [first, second]


def test_what_is_refused_changes_nothing(small):
    matcher = compile_("json_schema", PERSON, small).matcher()
    before = allowed(matcher, small)
    for token in (-1, 10**9, 299, 258, ord("x"), *small.eos_ids):
        assert not matcher.accept(token)
    assert allowed(matcher, small) == before
    with pytest.raises(ValueError, match="cannot undo"):
        matcher.rollback(1)
    matcher.rollback(0)


def test_ids_beyond_the_tokenizer_are_never_allowed(small):
    matcher = compile_("regex", "[^x]*", small).matcher()
    ids = allowed(matcher, small)
    assert max(i for i in ids if i not in small.eos_ids) <= 258
    assert set(small.eos_ids) <= set(ids)
    assert len(np.zeros(small.words, np.int32)) == 10


def test_a_row_of_another_shape_is_refused(small):
    matcher = compile_("regex", "a", small).matcher()
    for row in (np.zeros(9, np.int32), np.zeros(10, np.int64), np.zeros(20, np.int32)[::2]):
        with pytest.raises(ValueError, match="mask row"):
            matcher.fill(row)
    rows = np.zeros((3, 10), np.int32)
    matcher.fill(rows[1])
    assert not rows[0].any()
    assert rows[1].any()
    assert not rows[2].any()


def test_undoing_and_forking_at_any_point(real):
    grammar = compile_("json_schema", PERSON, real)
    draw = random.Random(0)
    for _ in range(5):
        matcher, taken = grammar.matcher(), []
        for _ in range(40):
            if matcher.is_done():
                break
            if taken and draw.random() < 0.3:
                count = draw.randint(1, len(taken))
                matcher.rollback(count)
                del taken[-count:]
            token = draw.choice(allowed(matcher, real))
            assert matcher.accept(token)
            taken.append(token)
        again = grammar.matcher()
        assert all(map(again.accept, taken))
        assert (again.can_end(), again.is_done()) == (matcher.can_end(), matcher.is_done())
        assert allowed(again, real) == allowed(matcher, real)


def test_forks_go_their_own_ways(small):
    one = compile_("regex", "a(b|c)d", small).matcher()
    assert one.accept(ord("a"))
    two = one.fork()
    assert one.accept(ord("b"))
    assert two.accept(ord("c"))
    assert not one.accept(ord("c"))
    one.rollback(2)
    assert allowed(two, small) == [ord("d")]
    assert one.accept(ord("a"))


def greedy(grammar, vocabulary, seed: int, jump: bool) -> tuple[list[int], int]:
    """What a made-up model with fixed likings writes, and the steps that it takes: each token's
    logits depend on the tokens before it."""
    matcher, out, steps = grammar.matcher(), [], 0
    row = np.zeros(vocabulary.words, np.int32)
    while not matcher.is_done() and len(out) < 80:
        forced = matcher.forced_tokens(out[-8:]) if jump else []
        if forced:
            for token in forced:
                assert matcher.accept(token)
            out += forced
            continue
        steps += 1
        matcher.fill(row)
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")[: vocabulary.size]
        logits = np.random.default_rng([seed, *out]).random(vocabulary.size)
        out.append(int(np.where(bits, logits, -1).argmax()))
        assert matcher.accept(out[-1])
    return out, steps


@pytest.mark.parametrize(("kind", "spec"), TASKS)
def test_jumping_changes_no_token(kind, spec, real):
    grammar = compile_(kind, spec, real)
    saved = 0
    for seed in range(8):
        with_jumps, few = greedy(grammar, real, seed, jump=True)
        without, many = greedy(grammar, real, seed, jump=False)
        assert with_jumps == without
        assert few <= many
        saved += many - few
    assert saved > 0


def test_forced_tokens_are_the_tokenizer_s_own(real, tokenizer):
    """Of a text that is forced whole, all but what a longer token could swallow."""
    grammar = compile_("regex", '\\{"first_name":"Ada", "[a-z]', real)
    matcher = grammar.matcher()
    forced = matcher.forced_tokens([])
    text = '{"first_name":"Ada", "'
    assert forced == real.encode(text.encode())[: len(forced)]
    assert len(forced) >= 5
    for token in forced:
        assert allowed(matcher, real) == [token]
        assert matcher.accept(token)


def test_a_vocabulary_without_an_end():
    vocabulary = Vocabulary([b"a", b"b", b"ab"], size=40)
    matcher = compile_("regex", "ab?", vocabulary).matcher()
    assert allowed(matcher, vocabulary) == [0, 2]
    assert matcher.accept(0)
    assert matcher.can_end()
    assert allowed(matcher, vocabulary) == [1]
    assert matcher.accept(1)
    assert matcher.is_done()
    with pytest.raises(GrammarError, match="end"):
        matcher.fill(np.zeros(vocabulary.words, np.int32))


def test_what_the_vocabulary_cannot_write_is_refused():
    vocabulary = Vocabulary([b"a", b"b", b""], eos_ids=[2])
    with pytest.raises(GrammarError):
        compile_("regex", "c", vocabulary)
    with pytest.raises(GrammarError):
        compile_("json_schema", {"type": "null"}, vocabulary)
    matcher = compile_("regex", "a|c", vocabulary).matcher()
    assert allowed(matcher, vocabulary) == [0]


def test_an_error_of_the_library_is_never_an_early_end(small):
    """Its own answer in the error state is that only an end may come, for ever. It is left by
    reading the same tokens anew."""
    matcher = compile_("json_schema", PERSON, small).matcher()
    for token in b'{"name":"A':
        assert matcher.accept(token)
    before = allowed(matcher, small)
    for call in (
        lambda: allowed(matcher, small) == before,
        lambda: not matcher.is_done(),
        lambda: matcher.accept(ord("b")),
        lambda: matcher.forced_tokens([]) == [],
        lambda: matcher.rollback(1) is None,
    ):
        assert not matcher.inner.consume_token(1)
        assert matcher.inner.is_error()
        assert call()
    assert allowed(matcher, small) == before
    assert matcher.accept(ord('"'))


def test_a_limit_that_stays_is_raised(small):
    matcher = compile_("json_schema", PERSON, small).matcher()
    for token in b'{"name":"A':
        assert matcher.accept(token)
    bad = matcher._grammar.lexers._make()
    bad.consume_token(ord("x"))
    matcher._grammar.lexers._make = lambda: bad
    matcher.inner.consume_token(1)
    with pytest.raises(GrammarError):
        matcher.fill(np.zeros(small.words, np.int32))
    assert not matcher.can_end()


def test_a_grammar_lives_on_when_its_lexer_is_worn_out(small):
    """The lexer keeps what it derives for all requests together; its bound, once met, is met by
    every copy of the start."""
    grammar = compile_("json_schema", PERSON, small)
    old = grammar.matcher()
    assert not old.lexer.start.consume_token(1)
    assert old.accept(ord("{"))
    for _ in range(2):
        matcher = grammar.matcher()
        assert allowed(matcher, small) == [256]
        assert all(matcher.accept(byte) for byte in b'{"name":"A","age":3}')
    assert matcher.lexer is not old.lexer
    assert len(grammar.lexers) == 1
    assert old.accept(ord('"'))


@pytest.mark.parametrize("spec", ["start: <|endoftext|>", "start: <|no-such-token|>"])
def test_what_the_library_breaks_on_is_refused_in_plain_words(spec, small):
    with pytest.raises(GrammarError) as caught:
        LLGuidanceBackend().compile(Spec.of("ebnf", spec), small)
    assert "backtrace" not in str(caught.value)
    assert "panic" not in str(caught.value)


def test_an_output_that_takes_ever_longer_to_follow_ends(small, monkeypatch):
    """It would hold up all others; a moment now and then is nobody's fault."""
    monkeypatch.setattr(llguidance_matcher, "CALL_SECONDS", 0.001)
    monkeypatch.setattr(llguidance_matcher, "MOST_OWED", 0.1)
    ambiguous = 'root ::= x x | "a" | "b"\nx ::= root root | root'
    matcher = compile_("ebnf", ambiguous, small).matcher()
    with pytest.raises(GrammarError, match="too ambiguous"):
        for i in range(3000):
            assert matcher.accept(ord("ab"[i % 2]))
    matcher = compile_("ebnf", 'root ::= root "a" | "b" | root "(" root ")"', small).matcher()
    matcher.slow = True
    assert all(matcher.accept(byte) for byte in b"b" + b"a(baaa)" * 400)
    assert matcher._owed == 0
    assert not matcher.slow


@pytest.mark.parametrize("fills", [0, 1])
def test_a_mask_after_going_back_is_that_of_where_the_output_is(fills):
    tokens = [*(bytes((i,)) for i in range(256)), b"yy", b"(z", b"(x", b""]
    small = Vocabulary(tokens, eos_ids=[259])
    text = 'root ::= c b\na ::= "(" | "xy"\nb ::= "y" | "xy" "y" | b\nc ::= "(" | "(" [x-z]'
    backend, rows = LLGuidanceBackend(1), np.zeros((2, small.words), np.int32)
    matcher, fresh = (backend.compile(Spec.of("ebnf", text), small).matcher() for _ in range(2))
    for token, row in ((258, rows[0]), (ord("x"), None)):
        assert matcher.accept(token)
        if fills and row is not None:
            matcher.fill(row)
    matcher.rollback(2)
    for one, row in zip((matcher, fresh), rows):
        assert one.accept(257)
        one.fill(row)
    np.testing.assert_array_equal(*rows)


@pytest.mark.parametrize(
    "text",
    [
        "[a-z]{1,3000}X?",
        "[a-z ,.]{3,40}",
        "[A-Za-z_][A-Za-z0-9_]{0,30}",
        r"[^,\n]{1,15}",
        r"[ -~]{2,9}é*",
        r"(\w{1,12} )*[0-9a-f]{8}",
        r'"[^"\\\x00-\x1F]{0,12}"',
    ],
)
def test_sets_of_tokens_taken_as_a_whole_allow_what_each_does(text, monkeypatch, real):
    """Against the library without any sets, along what is allowed."""
    spec, rng = Spec.of("regex", text), random.Random(7)
    grammars = [LLGuidanceBackend().compile(spec, real)]
    monkeypatch.setattr(llguidance_backend, "_SLICES", [])
    grammars.append(LLGuidanceBackend().compile(spec, real))
    one, plain = np.zeros((2, real.words), np.int32)
    for _ in range(6):
        matchers = [grammar.matcher() for grammar in grammars]
        for _ in range(12):
            matchers[0].fill(one)
            matchers[1].fill(plain)
            assert (one == plain).all()
            ids = np.flatnonzero(np.unpackbits(one.view(np.uint8), bitorder="little"))
            token = int(rng.choice(ids))
            assert all(matcher.accept(token) for matcher in matchers)
            if matchers[0].is_done():
                break
