"""Rows of an automaton's states: which states share one, when it is made, what is too large."""

from __future__ import annotations

import itertools
import time
import tracemalloc

import numpy as np
import pytest
from ramet.runtime.grammar import alike as alike_module
from ramet.runtime.grammar import automaton_backend
from ramet.runtime.grammar.alike import alike
from ramet.runtime.grammar.automaton import DEAD, MOST_FORCED, ByteAutomaton, build
from ramet.runtime.grammar.automaton_backend import AutomatonBackend
from ramet.runtime.grammar.backend import Refused
from ramet.runtime.grammar.checks_regex import check_regex
from ramet.runtime.grammar.compile import compile_spec
from ramet.runtime.grammar.spec import Spec
from ramet.runtime.grammar.token_levels import TokenLevels, levels_of
from ramet.runtime.grammar.vocabulary import Vocabulary

PATTERNS = [
    "a{3,40}b?",
    "(ab|ba|é)*B?0",
    ".{1,30}",
    "(?s)[^b]{5,20}😀?",
    "(aab){2,9}(b|0 )*",
    "[ab]*a[ab]{4}",
    "(a|b|0| |é|😀){4}",
]


def automaton_of(pattern: str) -> ByteAutomaton:
    return build(check_regex(pattern).tree)


def coming(automaton: ByteAutomaton, vocabulary: Vocabulary, state: int) -> set[int]:
    """Tokens that may come in a state, each followed by itself."""
    walk = automaton.walk
    return {i for i, data in enumerate(vocabulary.tokens) if data and walk(state, data) != DEAD}


def ids(row: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize("pattern", PATTERNS)
def test_rows_of_all_states_are_the_tokens_that_lead_somewhere(pattern, letters):
    automaton, levels = automaton_of(pattern), levels_of(letters)
    rows = levels.rows(automaton, np.arange(automaton.states))
    assert rows.shape == (automaton.states, letters.words)
    for state in range(automaton.states):
        assert ids(rows[state]) == coming(automaton, letters, state), state
    assert (levels.begun(automaton) >= [len(ids(row)) for row in rows]).all()
    longest = max(len(letters.tokens[i]) for row in rows for i in ids(row))
    assert longest <= levels.horizon(automaton) <= max(map(len, letters.tokens))


@pytest.mark.parametrize("pattern", PATTERNS[:4])
def test_rows_of_a_real_vocabulary(pattern, real):
    automaton = automaton_of(pattern)
    states = np.array([0, automaton.states // 2, automaton.states - 1])
    rows = levels_of(real).rows(automaton, states)
    assert [ids(row) for row in rows] == [coming(automaton, real, int(s)) for s in states]


def test_there_may_be_no_tokens_and_no_states():
    automaton = automaton_of("a+")
    for vocabulary in (Vocabulary([b"", b""], eos_ids=[1]), Vocabulary([])):
        levels = TokenLevels(vocabulary)
        assert not levels.rows(automaton, np.arange(2)).any()
        assert levels.horizon(automaton) == 0 and not levels.begun(automaton).any()
    assert levels_of(Vocabulary([b"a"])).rows(automaton, np.arange(0)).shape == (0, 1)


@pytest.mark.parametrize("length", [0, 1, 2, 3])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_alike_are_the_states_that_short_texts_do_not_tell_apart(pattern, length):
    automaton = automaton_of(pattern)
    firsts = list({key: byte for byte, key in enumerate(automaton.classes)}.values())
    texts = [bytes(text) for n in range(length + 1) for text in itertools.product(firsts, repeat=n)]
    seen = [
        tuple(automaton.walk(state, text) != DEAD for text in texts)
        for state in range(automaton.states)
    ]
    blocks = alike(automaton, length).tolist()
    assert len(set(zip(seen, blocks))) == len(set(seen)) == len(set(blocks))


def test_states_are_told_apart_also_where_the_hash_errs(monkeypatch):
    automaton = automaton_of("a{3,40}b?")
    expected = alike(automaton, 5)
    numbered = alike_module._numbered
    monkeypatch.setattr(alike_module, "_numbered", lambda lines, draw: numbered(lines, 0 * draw))
    again = alike(automaton, 5)
    assert len(set(zip(expected.tolist(), again.tolist()))) == len(set(expected.tolist())) == 10


@pytest.mark.parametrize("wide", [0, 3, 1_000])
def test_masks_do_not_tell_where_a_row_was_made(wide, letters, walks, monkeypatch):
    monkeypatch.setattr(automaton_backend, "_WIDE", wide)
    for pattern in PATTERNS:
        grammar = AutomatonBackend().compile(Spec.of("regex", pattern), letters)
        assert bool(len(grammar._rows)) == (wide < 1_000)
        todo, seen = [0], {0}
        while todo:
            state = todo.pop()
            matcher = grammar.matcher()
            matcher._state = matcher._place = state
            matcher._plan = ()
            expected = coming(grammar.automaton, letters, state)
            ends = set(letters.eos_ids) if grammar.automaton.is_final(state) else set()
            assert walks.allowed(matcher, letters) == expected | ends
            assert matcher.can_end() == bool(ends)
            for token in expected:
                after = grammar.automaton.walk(state, letters.tokens[token])
                if after not in seen:
                    seen.add(after)
                    todo.append(after)


@pytest.mark.parametrize(
    ("pattern", "rows"),
    [
        (r"[^\n]{1,40}", 60),
        (r"[a-z ,.]{20000,}", 2),
        (r".{1,2000}", 200),
        (r"[a-z]{3,700}", 40),
        (r"(\d{1,3}\.){3}\d{1,3}", 60),
    ],
)
def test_counts_make_many_states_and_few_rows(pattern, rows, real):
    started = time.process_time()
    grammar = AutomatonBackend().compile(Spec.of("regex", pattern), real)
    assert time.process_time() - started < 5
    assert len(grammar._rows) <= rows
    assert grammar.nbytes < 16 << 20
    row, matcher = np.zeros(real.words, np.int32), grammar.matcher()
    for token in real.encode(b"12.34.56.7" if "d" in pattern else b"abcde"):
        matcher.fill(row)
        assert token in ids(row) and matcher.accept(token)


def test_a_long_forced_text_is_held_once(real):
    """What each state and each token of it remembered took gigabytes."""
    grammar = AutomatonBackend().compile(Spec.of("regex", r"[xy]a{49000}"), real)
    before = grammar.nbytes
    tracemalloc.start()
    matcher = grammar.matcher()
    assert matcher.accept(real.encode(b"x")[0])
    taken = 1
    row = np.zeros(real.words, np.int32)
    while taken < 5_000:
        forced = matcher.forced_tokens([])
        assert sum(len(real.tokens[t]) for t in forced) <= MOST_FORCED
        for token in forced:
            matcher.fill(row)
            assert ids(row) == {token} and matcher.accept(token)
        if not forced:
            matcher.fill(row)
            forced = [min(ids(row))]
            assert matcher.accept(forced[0])
        taken += len(forced)
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert held < 400 * taken + (4 << 20)
    assert grammar.nbytes - before < 4 << 20


def test_a_grammar_says_what_it_holds(real):
    choices = [f"item {i * 7919 % 100_003} of {i}" for i in range(3_000)]
    data = AutomatonBackend().try_in_worker(Spec.of("choice", choices), real)
    levels_of(real)
    tracemalloc.start()
    grammar = AutomatonBackend().finish(Spec.of("choice", choices), real, data)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert grammar.nbytes > 1 << 20
    assert grammar.nbytes / 1.3 < held + len(data) < grammar.nbytes * 1.3 + len(data)


def test_many_choices(real, walks):
    choices = [f"item {i * 7919 % 100_003} of {i}" for i in range(3_000)]
    grammar = AutomatonBackend().compile(Spec.of("choice", choices), real)
    assert grammar.automaton.states > 10_000
    for choice in choices[::400]:
        assert walks.takes(grammar, real, choice)
        assert not walks.takes(grammar, real, choice + "0")


def test_what_takes_too_long_to_build_is_left_to_llguidance(real, walks):
    pattern = r"\w{1,60}( \w{1,20}){0,40}"
    with pytest.raises(Refused, match="too long to build"):
        AutomatonBackend().try_in_worker(Spec.of("regex", pattern), real)
    with pytest.raises(Refused, match="over 50,000 states"):
        AutomatonBackend().try_in_worker(Spec.of("regex", r"a{60000}"), real)
    with pytest.raises(Refused, match="over 100,000 characters"):
        many = [f"{i} comes after {i - 1}" for i in range(5_500)]
        AutomatonBackend().try_in_worker(Spec.of("choice", many), real)
    each = "".join(
        f"[^{a}{b}]" for a, b in itertools.permutations("abcdefghijklmnopqrstuvwxyzABCD", 2)
    )
    with pytest.raises(Refused, match="tell many tokens apart"):
        AutomatonBackend().try_in_worker(Spec.of("regex", each), real)


def test_the_route_goes_by_what_refuses(tokenizer_of_real):
    for pattern, kind in (
        (r"[^\n]{1,400}", "automaton"),
        (r"\w{1,60}( \w{1,20}){0,40}", "llguidance"),
    ):
        assert compile_spec("regex", pattern, tokenizer_of_real).kind == kind
    assert compile_spec("regex", "a+", tokenizer_of_real, backend="outlines").kind == "outlines"
