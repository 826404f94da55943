"""Several lexers of one grammar: outputs find one each, move, and are what they are with one."""

from __future__ import annotations

import gc
import logging
import random
import threading
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits
from ramet.runtime.grammar import llguidance_backend
from ramet.runtime.grammar.lexers import CROWD, MOST_BYTES, Growth, Lexers, threads_at_once
from ramet.runtime.grammar.llguidance_backend import LLGuidanceBackend
from ramet.runtime.grammar.llguidance_matcher import MOST_READ
from ramet.runtime.grammar.side_by_side import MOVED_TOKENS, SideBySide, by_lexer, shares, spread
from ramet.runtime.grammar.spec import Spec
from ramet.runtime.grammar.vocabulary import Vocabulary
from ramet.runtime.protocol.errors import GrammarError

LISTS = {"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 2}


def compile_(vocabulary, lexers, spec=LISTS):
    backend = LLGuidanceBackend(lexers)
    kind = "json_schema" if isinstance(spec, dict) else "regex"
    return backend.compile(Spec.of(kind, spec), vocabulary), backend.growth


def allowed(matcher, vocabulary) -> list[int]:
    row = np.full(vocabulary.words, -1, np.int32)
    matcher.fill(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def settle(growth):
    """Wait until everybody has the lexers they asked for."""
    if (thread := growth._thread) is not None:
        thread.join(20)
        assert not thread.is_alive()


def users(grammar):
    return [len(lexer.users) for lexer in grammar.lexers._all]


def test_lexers_are_as_many_as_outputs_make_worth(small):
    grammar, growth = compile_(small, 3)
    held = [grammar.matcher() for _ in range(CROWD)]
    settle(growth)
    assert users(grammar) == [CROWD]
    one = grammar.nbytes
    held.append(grammar.matcher())
    settle(growth)
    assert users(grammar) == [CROWD + 1, 0]
    assert grammar.nbytes == 2 * one
    held += [grammar.matcher() for _ in range(CROWD)]
    settle(growth)
    assert users(grammar) == [CROWD + 1, CROWD]
    held += [grammar.matcher() for _ in range(5 * CROWD)]
    settle(growth)
    held += [grammar.matcher() for _ in range(5 * CROWD)]
    settle(growth)
    assert len(grammar.lexers) == 3
    assert max(users(grammar)) - min(users(grammar)) <= 1
    assert sum(users(grammar)) == len(held)


def test_a_burst_has_all_that_are_of_use(small):
    grammar, growth = compile_(small, 5)
    held = [grammar.matcher() for _ in range(5 * CROWD + 1)]
    settle(growth)
    assert len(grammar.lexers) == 5
    assert sum(users(grammar)) == len(held)
    assert growth._thread is None


def test_one_lexer_is_all_there_is_where_no_other_thread_would_use_it(small):
    grammar, growth = compile_(small, 1)
    held = [grammar.matcher() for _ in range(5 * CROWD)]
    assert growth._thread is None
    assert users(grammar) == [len(held)]
    assert threads_at_once() >= 1


def test_users_are_those_alive_forks_too(small):
    grammar, _ = compile_(small, 1)
    one = grammar.matcher()
    two, three = one.fork(), grammar.matcher()
    assert users(grammar) == [3]
    del two
    assert users(grammar) == [2]
    del three, one
    assert users(grammar) == [0]


def crowd(grammar, growth, count=4 * CROWD):
    """Matchers that all came before there was a second lexer."""
    first = grammar.lexers._all[0]
    held = [grammar.matcher() for _ in range(count)]
    settle(growth)
    for matcher in held:
        if matcher.lexer is not first:
            matcher.move(first)
    assert users(grammar)[0] == count
    return held


def test_outputs_move_to_lexers_of_fewer_and_stay_what_they_are(small):
    grammar, growth = compile_(small, 2)
    held = crowd(grammar, growth)
    for i, matcher in enumerate(held):
        assert all(map(matcher.accept, b'["' + b"abcdefgh"[: i % 8]))
    want = [(allowed(m.fork(), small), m.can_end(), m.is_done()) for m in held]
    gc.collect()
    spread([(matcher, 0) for matcher in held])
    assert users(grammar) == [len(held) // 2] * 2
    grammar.rows.start = type(grammar.rows.start)()  # so that all is computed anew
    moved = 0
    for i, (matcher, before) in enumerate(zip(held, want)):
        moved += matcher.lexer.at
        assert (allowed(matcher, small), matcher.can_end(), matcher.is_done()) == before
        matcher.rollback(1 + i % 8)
        assert all(map(matcher.accept, b'""'))
        assert not matcher.accept(ord("a"))
        assert matcher.accept(ord(","))
        matcher.rollback(2)
        assert matcher.accept(ord("a"))
    assert moved == len(held) // 2


def test_an_output_that_is_long_stays_and_a_step_moves_few(small):
    grammar, growth = compile_(small, 2, "[ab]{0,5000}")
    held = crowd(grammar, growth)
    for matcher in held:
        assert all(map(matcher.accept, b"ab" * (MOST_READ // 2)))
    spread([(matcher, 0) for matcher in held])
    assert users(grammar)[1] == MOVED_TOKENS // MOST_READ
    for matcher in held:
        matcher.accept(ord("a"))
    spread([(matcher, 0) for matcher in held])
    assert users(grammar)[1] == MOVED_TOKENS // MOST_READ


def test_an_output_that_another_lexer_cannot_read_stays(small):
    grammar, growth = compile_(small, 2)
    held = crowd(grammar, growth)
    before = allowed(held[0].fork(), small)
    other = grammar.lexers._all[1]
    assert not other.start.consume_token(1)  # from here on it is in its error state
    spread([(matcher, 0) for matcher in held])
    gc.collect()
    assert users(grammar) == [len(held), 0]
    grammar.rows.start = type(grammar.rows.start)()
    assert allowed(held[0], small) == before
    assert held[0].move(other) == 0


def test_an_error_renews_its_own_lexer_alone(small):
    grammar, growth = compile_(small, 3)
    held = [grammar.matcher() for _ in range(3 * CROWD + 1)]
    settle(growth)
    spread([(matcher, 0) for matcher in held])
    assert sorted(map(len, by_lexer([(m, 0) for m in held]))) == [CROWD, CROWD, CROWD + 1]
    before = list(grammar.lexers._all)
    one = next(matcher for matcher in held if matcher.lexer is before[1])
    assert one.accept(ord("["))
    one.inner.consume_token(1)
    assert allowed(one, small) == [ord('"'), 257]
    after = grammar.lexers._all
    assert [new is old for new, old in zip(after, before)] == [True, False, True]
    assert one.lexer is after[1]
    assert one in after[1].users
    assert one not in before[1].users
    other = next(matcher for matcher in held if matcher.lexer is before[1])
    other.inner.consume_token(1)
    assert allowed(other, small) == [ord("[")]
    assert other.lexer is after[1] is grammar.lexers._all[1]


def test_a_lexer_that_cannot_be_made_is_done_without(small, caplog):
    grammar, growth = compile_(small, 4)
    made, calls = grammar.lexers._make, []

    def make():
        calls.append(threading.current_thread())
        if len(calls) > 1:
            raise GrammarError("no room")
        return made()

    grammar.lexers._make = make
    with caplog.at_level(logging.WARNING):
        held = [grammar.matcher() for _ in range(6 * CROWD)]
        settle(growth)
        held += [grammar.matcher() for _ in range(6 * CROWD)]
        settle(growth)
    assert len(grammar.lexers) == 2
    assert len(calls) == 2
    assert threading.main_thread() not in calls
    assert [r.getMessage() for r in caplog.records] == ["a grammar goes on with 2 lexers: no room"]
    assert allowed(held[-1], small) == [ord("[")]


def test_where_no_thread_is_to_be_had_there_is_one_lexer(small, monkeypatch, caplog):
    def start(_thread):
        raise RuntimeError("can't start new thread")

    grammar, growth = compile_(small, 4)
    monkeypatch.setattr(threading.Thread, "start", start)
    held = [grammar.matcher() for _ in range(3 * CROWD)]
    assert users(grammar) == [len(held)]
    assert len(caplog.records) == 1
    assert growth._thread is None


def test_who_is_gone_gets_none_and_is_not_kept(small):
    growth, at_work, go = Growth(), threading.Event(), threading.Event()
    grammar, _ = compile_(small, 1)
    real = grammar.lexers._make

    def slow():
        if threading.current_thread() is not threading.main_thread():
            at_work.set()
            assert go.wait(10)
        return real()

    first, second = (Lexers(slow, 1000, growth, most=3) for _ in range(2))
    ends = [weakref.ref(first), weakref.ref(second)]
    growth.ask(first)
    assert at_work.wait(10)
    growth.ask(second)
    del second
    assert ends[1]() is None
    go.set()
    settle(growth)
    assert len(first) == 2
    del first
    gc.collect()
    assert ends[0]() is None


@pytest.mark.parametrize(("nbytes", "count"), [(1000, 3), (MOST_BYTES // 2, 3), (MOST_BYTES, 2),
                                               (MOST_BYTES + 1, 1)])  # fmt: skip
def test_lexers_of_a_large_grammar_are_few(nbytes, count, small):
    grammar, growth = compile_(small, 1)
    lexers = Lexers(grammar.lexers._make, nbytes, growth, most=3)
    held = [set() for _ in range(6 * CROWD)]
    things = [type("User", (), {})() for _ in held]
    for thing in things:
        lexers.take().copy(thing)
    settle(growth)
    assert len(lexers) == count
    assert lexers.nbytes == count * nbytes


def test_who_took_its_token_is_told_apart(small):
    grammar, growth = compile_(small, 2, "(a|b)(c|d)")
    held = [grammar.matcher() for _ in range(3 * CROWD)]
    settle(growth)
    spread([(matcher, 0) for matcher in held])
    tokens = [ord("abcd"[i % 3]) for i in range(len(held))]
    assert SideBySide(2).accept(list(zip(held, tokens))) == [t != ord("c") for t in tokens]


def test_parts_are_whole_lexers_and_about_as_large():
    groups = [[i] * n for i, n in enumerate((9, 1, 5, 4, 4, 1))]
    parts = shares(groups, 3)
    assert sorted(len(part) for part in parts) == [7, 8, 9]
    assert sum(i in part for part in parts for i in range(6)) == 6
    assert shares(groups, 6) == groups


STEPS = st.lists(st.tuples(st.sampled_from("ggggggurf"), st.integers(0, 1 << 30)), max_size=12)
SPECS = [LISTS, {"type": "object", "additionalProperties": {"type": "number"}}, "[a-f]{3,9}x?|ä+"]
VOCABULARY = Vocabulary(
    [*(bytes((i,)) for i in range(256)), b'{"', b'":', b'", "', b"ab", b""], eos_ids=[260]
)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SPECS), st.lists(STEPS, min_size=3, max_size=3))
def test_many_lexers_are_as_one(spec, walks):
    """Outputs that go on, go back, are copied and end, side by side and alone."""
    many, growth = compile_(VOCABULARY, 3, spec)
    alone, _ = compile_(VOCABULARY, 1, spec)
    ours = [many.matcher() for _ in range(2 * CROWD)]
    settle(growth)
    theirs = [alone.matcher() for _ in ours]
    side = SideBySide(2)
    for step in range(max(map(len, walks))):
        rows = np.full((len(ours), VOCABULARY.words), 5, np.int32)
        wanted = [(m, i) for i, m in enumerate(ours) if m.computes(rows[i])]
        if wanted:
            side.fill(rows, wanted)
            for matcher, i in wanted:
                matcher.filled(rows[i])
        taking = []
        for i, (mine, other) in enumerate(zip(ours, theirs)):
            other.fill(want := np.zeros_like(rows[i]))
            np.testing.assert_array_equal(rows[i], want)
            bits = np.flatnonzero(np.unpackbits(want.view(np.uint8), bitorder="little"))
            walk = walks[i % len(walks)]
            act, draw = walk[step] if step < len(walk) else ("g", i)
            if act == "u" and mine._tokens and not mine._ended:
                back = 1 + draw % len(mine._tokens)
                mine.rollback(back)
                other.rollback(back)
            elif act == "f":
                ours[i], theirs[i] = mine.fork(), other.fork()
            elif act == "r":
                assert mine.forced_tokens([]) == other.forced_tokens([])
            else:
                token = int(bits[(draw + i) % len(bits)])
                if mine.asks_library(token):
                    taking.append((mine, token))
                    assert other.accept(token)
                else:
                    assert mine.accept(token) == other.accept(token)
        if taking:
            for (mine, token), took in zip(taking, side.accept(taking)):
                assert took
                mine.took(token)
        for mine, other in zip(ours, theirs):
            assert (mine.can_end(), mine.is_done()) == (other.can_end(), other.is_done())
    assert len(many.lexers) == 2
    assert not any(walks) or min(users(many)) > 0


@pytest.fixture
def tight(monkeypatch):
    """Lexers of few states."""
    limits = LLParserLimits(max_lexer_states=200, verbose_errors=False)
    monkeypatch.setattr(llguidance_backend, "_limits", lambda: limits)


def wear_out(grammar, row):
    """An output that takes a lexer to its bound, and goes on with a fresh one."""
    other, draw = grammar.matcher(), random.Random(1)
    first = other.lexer
    for _ in range(1000):
        other.fill(row)
        if other.lexer is not first:
            return
        assert other.accept(draw.choice(b"ab"))
    pytest.fail("the lexer did not meet its bound")


def test_an_output_goes_on_when_another_wears_out_their_lexer(tight, small):
    """The library tells whom it computes a mask for; it refuses all others' tokens and ends."""
    grammar = LLGuidanceBackend(1).compile(Spec.of("regex", "([ab]*a[ab]{9}c)?[abd]*"), small)
    row = np.zeros(small.words, np.int32)
    held = [grammar.matcher() for _ in range(3)]
    for matcher in held:
        assert matcher.accept(ord("b"))
        matcher.fill(row)
    assert held[2].accept(ord("d"))
    wear_out(grammar, row)
    assert held[0].accept(ord("d"))
    assert not held[0].accept(ord("x"))
    assert held[1].can_end()
    assert held[1].accept(small.eos_ids[0])
    assert held[1].is_done()
    assert held[2].accept(ord("d"))


def test_who_meets_the_bound_of_a_lexer_while_accepting_goes_on(tight, small):
    """The library says no more than that the token may not come."""
    grammar = LLGuidanceBackend(1).compile(Spec.of("regex", "([ab]*a[ab]{9}c)?[ab]*"), small)
    draw = random.Random(2)
    grammar.matcher().fill(np.zeros(small.words, np.int32))  # sets the bound
    first = grammar.lexers._all[0]
    matcher = grammar.matcher()
    for at in range(400):
        assert matcher.accept(draw.choice([ord("a"), ord("b"), 258])), at
    assert matcher.lexer is not first
    assert matcher.can_end()


def test_who_begins_anew_has_a_lexer_of_its_own_at_last(tight, small):
    """The one that took the place of a worn one may be as worn."""
    grammar = LLGuidanceBackend(1).compile(Spec.of("regex", "([ab]*a[ab]{9}c)?[abd]*"), small)
    row, draw = np.zeros(small.words, np.int32), random.Random(3)
    held = grammar.matcher()
    assert held.accept(ord("b"))
    wear_out(grammar, row)
    inner = grammar.lexers._all[0].start.deep_copy()
    inner.compute_bitmask()
    while inner.consume_token(draw.choice(b"ab")):
        pass
    assert held.accept(ord("d"))
    held.fill(row)


def test_what_must_come_is_known_of_a_worn_lexer_too(tight, small):
    """The library says that nothing must."""
    grammar = LLGuidanceBackend(1).compile(
        Spec.of("regex", "([ab]*a[ab]{9}c)?[abd]*|xyzxyz[ab]*"), small
    )
    held = grammar.matcher()
    assert held.accept(ord("x"))
    wear_out(grammar, np.zeros(small.words, np.int32))
    assert held.forced_tokens([]) == list(b"yzxyz")
