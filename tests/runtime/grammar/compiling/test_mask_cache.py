"""Rows that outputs of one grammar share: always those that would be computed, and bounded."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from ramet.runtime.grammar import llguidance_matcher
from ramet.runtime.grammar.llguidance_backend import LLGuidanceBackend
from ramet.runtime.grammar.mask_cache import MaskCache
from ramet.runtime.grammar.spec import Spec

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["alpha", "beta"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 1000},
        "more": {"type": "array", "items": {"type": ["boolean", "null"]}, "maxItems": 3},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}
SPECS = [
    Spec.of("json_schema", RECORD),
    Spec("ebnf", 'root ::= "(" root ")" root | [a-c]{0,3} | ""'),
    Spec("regex", r"(ab|a[bc]+|\{\"x\":[0-9]{1,3}\})*"),
]


@pytest.fixture(scope="module")
def backend() -> LLGuidanceBackend:
    return LLGuidanceBackend()


def row_of(matcher, vocabulary) -> np.ndarray:
    row = np.full(vocabulary.words, -1, np.int32)
    matcher.fill(row)
    return row


def allowed(row: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def compare_walks(grammar, fresh, vocabulary, draw: random.Random, steps: int) -> None:
    """Walk ``grammar`` at random beside ``fresh``, which shares nothing with anyone."""
    ours, other = grammar.matcher(), fresh.matcher()
    taken = 0
    for _ in range(steps):
        assert ours.is_done() == other.is_done()
        assert ours.can_end() == other.can_end()
        if draw.random() < 0.3:
            assert ours.forced_tokens([]) == other.forced_tokens([])
        if taken and draw.random() < 0.15:
            back = draw.randint(1, min(taken, 4))
            ours.rollback(back)
            other.rollback(back)
            taken -= back
        if draw.random() < 0.1:
            ours = ours.fork()
        if ours.is_done():
            return
        row = row_of(ours, vocabulary)
        assert np.array_equal(row, row_of(other, vocabulary))
        token = draw.choice(allowed(row)[:6])
        assert ours.accept(token)
        assert other.accept(token)
        taken += 1


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
@pytest.mark.parametrize("room", [1 << 20, 3000, 0], ids=["roomy", "tight", "none"])
def test_rows_are_those_that_would_be_computed(backend, small, spec, room, monkeypatch):
    monkeypatch.setattr(llguidance_matcher, "MAX_ROW_BYTES", room)
    grammar = backend.compile(spec, small)
    monkeypatch.setattr(llguidance_matcher, "MAX_ROW_BYTES", 0)
    draw = random.Random(str(spec.kind))
    for _ in range(30):
        fresh = backend.compile(spec, small)
        compare_walks(grammar, fresh, small, draw, 40)
        assert grammar.rows.nbytes <= room


def test_the_library_is_asked_nothing_along_another_output(backend, small):
    grammar = backend.compile(SPECS[0], small)
    text = small.encode(json.dumps({"name": "ab", "kind": "beta"}, separators=(",", ":")).encode())
    seen = []
    for turn in range(2):
        matcher = grammar.matcher()
        inner = matcher._inner
        if turn:
            matcher._inner = None
        for i, token in enumerate([*text, None]):
            said = matcher.is_done(), matcher.forced_tokens([])
            row = None if matcher.is_done() else row_of(matcher, small)
            if turn:
                assert seen[i][0] == said
                assert np.array_equal(seen[i][1], row)
            else:
                seen.append((said, row))
            if token is not None:
                assert matcher.accept(token)
        assert matcher.is_done()
        matcher._inner = inner
        assert matcher.can_end()
    assert not any(done for (done, _), _ in seen[:-1])
    assert any(forced for (_, forced), _ in seen)


def test_tokens_that_are_known_pass_where_nothing_is_to_be_done(backend, small):
    grammar = backend.compile(Spec.of("regex", "a(b|c)x[de]"), small)
    first = grammar.matcher()
    assert not first.passes(ord("a"), False)
    for token in b"abxd":
        assert first.accept(token)
    again = grammar.matcher()
    assert not again.passes(ord("a"), False)  # whether it is done there, nobody asked
    for token in b"abxd":
        assert again.accept(token)
        again.is_done()
    third = grammar.matcher()
    assert not third.passes(ord("a"), True)  # nor what is forced
    assert not third.passes(ord("c"), False)
    assert third.passes(ord("a"), False)
    assert third.accept(ord("b"))
    assert third.forced_tokens([]) == [ord("x")]
    third.rollback(1)
    assert not third.passes(ord("b"), True)
    assert third.passes(ord("b"), False)
    assert third.passes(ord("x"), False)
    assert not third.passes(ord("d"), False)  # it would be done
    assert allowed(row_of(third, small)) == [ord("d"), ord("e")]
    assert third.accept(ord("e"))
    assert third.is_done()
    third.rollback(3)
    assert allowed(row_of(third, small)) == [ord("b"), ord("c")]


def test_what_is_yet_to_be_read_is_read_for_whoever_asks(backend, small):
    grammar = backend.compile(Spec.of("regex", "abcd[e-g]{1,9}h"), small)
    first = grammar.matcher()
    assert all(map(first.accept, b"abcdef"))
    for ask in (
        lambda m: m.can_end() is False,
        lambda m: m.fork().accept(ord("h")),
        lambda m: not m.accept(ord("a")),
        lambda m: m.accept(ord("h")) and m.is_done() and m.can_end(),
        lambda m: m.rollback(1) is None and m.accept(ord("g")) and m.accept(ord("h")),
        lambda m: m.accept(ord("e")) and m.rollback(2) is None and m.accept(ord("h")),
        lambda m: m.rollback(6) is None and m.accept(ord("a")),
    ):
        matcher = grammar.matcher()
        assert all(map(matcher.accept, b"abcdef"))
        assert matcher._unread == 6
        assert ask(matcher)
    matcher = grammar.matcher()
    assert all(map(matcher.accept, b"abcd"))
    matcher._inner.consume_token(1)  # the library never leaves this state
    assert matcher.accept(ord("g"))
    assert not matcher.can_end()
    assert matcher.accept(ord("h"))
    assert matcher.is_done()


def test_tokens_are_read_once_however_the_library_comes_by_them(backend, small):
    grammar = backend.compile(Spec.of("regex", "[a-z]{6,9}"), small)
    first = grammar.matcher()
    assert all(map(first.accept, b"abcdefgh"))
    matcher = grammar.matcher()
    assert all(map(matcher.accept, b"abcd"))
    assert not matcher.can_end()  # reads four
    assert all(map(matcher.accept, b"ef"))
    assert matcher._unread == 2
    matcher.rollback(1)
    assert not matcher.can_end()
    assert matcher.accept(ord("f"))
    assert matcher.can_end()
    assert all(map(matcher.accept, b"gh"))
    matcher.rollback(4)
    assert not matcher.can_end()
    assert all(map(matcher.accept, b"ef"))
    matcher.begin_anew()
    assert matcher._unread == 0
    assert matcher.can_end()
    assert matcher.accept(ord("g"))
    renewed = matcher.lexer
    assert matcher.move(renewed) == 7
    assert matcher._unread == 0
    assert matcher.accept(ord("h"))
    assert matcher.accept(ord("x"))
    assert matcher.is_done()
    assert matcher.lexer is renewed


def test_nothing_is_known_behind_an_end(backend, small):
    grammar = backend.compile(Spec.of("regex", "aab?"), small)
    first = grammar.matcher()
    assert all(map(first.accept, b"aab"))
    matcher = grammar.matcher()
    assert all(map(matcher.accept, [*b"aa", small.eos_ids[0]]))
    assert not matcher.accept(ord("b"))
    assert not matcher.passes(ord("b"), False)
    matcher.rollback(1)
    assert matcher.accept(ord("b"))


def test_a_kept_row_is_a_copy(backend, small):
    grammar = backend.compile(SPECS[0], small)
    row = row_of(grammar.matcher(), small)
    first = row.copy()
    row[:] = -1
    again = row_of(grammar.matcher(), small)
    assert np.array_equal(again, first)
    again[:] = 0
    assert np.array_equal(row_of(grammar.matcher(), small), first)


def test_when_memory_is_short_only_what_comes_twice_is_kept():
    cache = MaskCache(10_000)
    row = np.arange(500, dtype=np.int32) + 1
    places = [cache.start]
    for token in range(3):
        cache.keep(places[-1], row)
        following = cache.next(places, token)
        assert following is not None
        places.append(following)
    assert cache.nbytes > 5_000
    cache.keep(places[-1], row)
    assert places[-1].row is None
    cache.keep(places[-1], row)
    assert places[-1].row is not None
    before, old = cache.nbytes, cache.start
    cache.keep(places[-1], row)  # there is no room any more
    assert cache.nbytes < before
    assert cache.start is not old
    assert cache.next(places, 9) is None, "who is on the old tree goes on without"
    assert cache.next([cache.start], 9) is not None


def test_the_grammar_says_what_its_rows_take(backend, small):
    grammar = backend.compile(SPECS[0], small)
    before = grammar.nbytes
    row_of(grammar.matcher(), small)
    assert grammar.nbytes > before


@pytest.mark.parametrize("words", [0, 1, 64, 65, 500])
def test_rows_come_back_as_they_were(words):
    cache = MaskCache(1 << 20)
    row = np.zeros(500, np.int32)
    row[np.random.default_rng(words).permutation(500)[:words]] = -(1 << 31) + 5
    cache.keep(cache.start, row)
    out = np.full(500, -1, np.int32)
    assert cache.copy(cache.start, out)
    assert np.array_equal(out, row)
    assert cache.nbytes <= max(row.nbytes, 1000)


def test_who_stands_still_keeps_nothing_of_a_tree_that_is_forgotten():
    """Outputs that think, or wait for a row, hold the places where they are."""
    cache = MaskCache(6000)
    start, held = cache.start, [cache.start]
    for token in range(3):
        held.append(cache.next(held, token))
    cache.keep(held[-1], np.ones(200, np.int32))
    walk = [start]
    while cache.start is start:
        place = cache.next(walk, 7)
        walk = [start] if place is None else [*walk, place]
    assert [(place.after, place.row) for place in held] == [({}, None)] * 4
