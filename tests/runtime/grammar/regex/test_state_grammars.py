"""Regexes and choices as states with rows: masks, ends, undoing, bounds, vocabularies."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
from ramet.runtime.grammar import state_matcher
from ramet.runtime.grammar.spec import Spec
from ramet.runtime.grammar.vocabulary import Vocabulary
from ramet.runtime.protocol.errors import GrammarError

REAL = [
    (r"(ab)*", ["", "ab", "abababab"], ["a", "aba"]),
    (r"[0-9]+(\.[0-9]+)?", ["0.5", "10", "123.456"], ["0.", ".5", ""]),
    (r"(yes|yes please)", ["yes", "yes please"], ["yes ", "please"]),
    (r"1|10|100", ["1", "10", "100"], ["0", "1000"]),
    (r"a{2,3}?b??", ["aa", "aaab"], ["a", "aabb"]),
    (r"[-+]?[0-9]*\.?[0-9]+[ \n]*", ["-1", "+.5 ", "3.14\n"], ["", "-", "1."]),
    (r"(True|False)", ["True", "False"], ["true", "Tru"]),
    (r'"[\w\d\s]*"', ['"naïve 日本 x_1"', '""'], ['"a.b"', '"a']),
    (r"(?i)(red|grün)", ["RED", "GRÜN", "grün"], ["gruen"]),
    (r"[^a-z\n]{1,3}", ["ABC", "é😀", "\t"], ["a", "\n", ""]),
    (r".*\.\.\.", ["...", "wait....", "日本..."], ["..", "a\n..."]),
    (r"\p{Lu}\p{Ll}+", ["Émile", "Ωmega"], ["émile", "É"]),
    (r"(😀|👍){1,3}", ["😀", "👍😀👍"], ["", "😂", "😀😀😀😀"]),
    (r"\d{4}-\d{2}", ["2024-05", "٢٠٢٤-٠٥"], ["24-05"]),
]


@pytest.mark.parametrize(("pattern", "yes", "no"), REAL, ids=[p for p, _, _ in REAL])
def test_every_match_can_be_written_with_a_real_vocabulary(pattern, yes, no, real, walks):
    grammar = walks.compile(pattern, real)
    for text in yes:
        assert "\\p" in pattern or re.fullmatch(pattern, text)
        assert walks.takes(grammar, real, text), text
    for text in no:
        assert not walks.takes(grammar, real, text), text


def test_choices_are_written_whole_and_end(real, walks):
    choices = ["yes", "yes please", "no.", "日本", "", "a|b", '"q"']
    grammar = walks.compile(choices, real)
    assert grammar.kind == walks.backend.name
    assert all(walks.takes(grammar, real, choice) for choice in choices)
    assert not any(walks.takes(grammar, real, text) for text in ("yes ", "a", "b", "no", "日"))
    matcher = grammar.matcher()
    for token in real.encode(b"yes please"):
        assert matcher.accept(token)
    assert matcher.is_done() and walks.allowed(matcher, real) == set(real.eos_ids)


def test_ends_are_allowed_where_the_text_is_whole_and_nowhere_else(walks):
    vocabulary = Vocabulary([b"a", b"b", b"!", b"", b""], size=70, eos_ids=[3, 4, 66])
    matcher = walks.compile("ab?", vocabulary).matcher()
    assert not matcher.can_end() and not matcher.is_done()
    assert walks.allowed(matcher, vocabulary) == {0}
    assert not matcher.accept(3) and not matcher.accept(66)
    assert matcher.accept(0)
    assert matcher.can_end() and not matcher.is_done()
    assert walks.allowed(matcher, vocabulary) == {1, 3, 4, 66}
    assert matcher.accept(66)
    assert matcher.is_done() and matcher.can_end()
    assert not matcher.accept(1) and not matcher.accept(66)
    assert matcher.forced_tokens([]) == []
    with pytest.raises(GrammarError):
        matcher.fill(np.zeros(3, np.int32))
    matcher.rollback(1)
    assert matcher.accept(1) and matcher.is_done()
    assert walks.allowed(matcher, vocabulary) == {3, 4, 66}


def test_a_whole_output_without_an_id_to_end_it_is_an_error(walks):
    vocabulary = Vocabulary([b"a", b"!"])
    matcher = walks.compile("a", vocabulary).matcher()
    assert matcher.accept(0) and matcher.is_done()
    with pytest.raises(GrammarError, match="no token to end"):
        matcher.fill(np.zeros(1, np.int32))


def test_ids_outside_and_ids_without_text_are_never_taken(real, walks):
    matcher = walks.compile(".*", real).matcher()
    specials = [i for i, data in enumerate(real.tokens) if not data and i not in real.eos_ids]
    for token in (-1, real.size, 2**40, *specials[:5]):
        assert not matcher.accept(token)
    assert not walks.allowed(matcher, real) & set(specials)
    assert specials


def test_equal_tokens_are_all_allowed(walks):
    vocabulary = Vocabulary([b"a", b"b", b"a", b"!", b""], eos_ids=[4])
    matcher = walks.compile("(a|b)b", vocabulary).matcher()
    assert walks.allowed(matcher, vocabulary) == {0, 1, 2}
    assert matcher.accept(2)


@pytest.mark.parametrize("pattern", ["(ab|ba|é)*c?0", "(a|ab|aab)[ab]{2}é?", ".{2}(a😀)*"])
def test_undoing_any_tokens_is_as_if_they_had_not_come(pattern, letters, walks):
    rng = random.Random(3)
    grammar = walks.compile(pattern.replace("c", "B"), letters)
    matcher, taken = grammar.matcher(), []
    for _ in range(300):
        if taken and (matcher.is_done() or rng.random() < 0.3):
            n = rng.randint(0, len(taken))
            matcher.rollback(n)
            del taken[len(taken) - n :]
        else:
            token = rng.choice(sorted(walks.allowed(matcher, letters)))
            assert matcher.accept(token)
            taken.append(token)
        fresh = grammar.matcher()
        assert all(fresh.accept(t) for t in taken)
        assert fresh.can_end() == matcher.can_end() and fresh.is_done() == matcher.is_done()
        assert fresh.forced_tokens([]) == matcher.forced_tokens([])
        if not (taken and taken[-1] in letters.eos_ids):
            assert walks.allowed(fresh, letters) == walks.allowed(matcher, letters)
    with pytest.raises(ValueError):
        matcher.rollback(len(taken) + 1)


def test_forks_go_their_own_ways(letters, walks):
    matcher = walks.compile("(a|b)(a|b)", letters).matcher()
    a, b = letters.ids_of_bytes[b"a"], letters.ids_of_bytes[b"b"]
    assert matcher.accept(a)
    other = matcher.fork()
    assert other.accept(b) and other.is_done() and not matcher.is_done()
    other.rollback(2)
    assert not other.can_end()
    matcher.rollback(1)
    assert matcher.accept(b) and matcher.accept(b)


WALKED = ["(ab|ba|é)*B?0", "(a|b)ab0(é😀)?", "[ab]{2,5}", "a(b|0)é😀(a|B)", ".*"]


def place_of(matcher) -> tuple:
    history = [(state, place) for state, place, *_ in matcher._history]
    return matcher._state, matcher._place, matcher._ended, matcher._tokens.copy(), history


def learn_all(grammar) -> None:
    """The grammar comes to know all its states."""
    if grammar.kind == "automaton":
        states = set(range(grammar.automaton.states))
    else:
        ways = grammar.index.get_transitions()
        states = {*ways, *(after for each in ways.values() for after in each.values())}
    for state in states:
        grammar.state(state)


@pytest.mark.parametrize("jumps", [True, False])
@pytest.mark.parametrize("pattern", WALKED)
def test_tokens_pass_where_they_are_taken_and_leave_nothing_to_do(pattern, jumps, letters, walks):
    rng = random.Random(5)
    grammar = walks.compile(pattern, letters)
    learn_all(grammar)
    matcher, twin = grammar.matcher(), grammar.matcher()
    passed = refused = shared = 0
    for _ in range(400):
        if twin.is_done() or rng.random() < 0.2:
            n = rng.randint(0, len(twin._history))
            matcher.rollback(n)
            twin.rollback(n)
        if rng.random() < 0.1:
            matcher, twin = matcher.fork(), twin.fork()
        if twin.is_done():
            continue
        token = rng.choice(sorted(walks.allowed(twin, letters)))
        if rng.random() < 0.2:
            token = rng.randrange(-2, letters.size + 2)
        before, plan = place_of(matcher), (matcher._plan, matcher._next)
        taken = twin.accept(token)
        free = not jumps or not grammar.automaton.forced(twin._place)[0]
        found = matcher.passes(token, jumps)
        assert found == (taken and not twin.is_done() and free), token
        if not found:
            assert (place_of(matcher), (matcher._plan, matcher._next)) == (before, plan)
            assert matcher.accept(token) == taken
        elif jumps:
            assert twin.forced_tokens([]) == []
        passed, refused = passed + found, refused + (not found)
        assert place_of(matcher) == place_of(twin)
        assert matcher.is_done() == twin.is_done() and matcher.can_end() == twin.can_end()
        if rng.random() < 0.5:
            assert matcher.forced_tokens([]) == twin.forced_tokens([])
        if not twin._ended:
            kept = matcher.row()
            assert walks.allowed(matcher, letters) == walks.allowed(twin, letters)
            if kept is not None:
                bits = np.unpackbits(kept.view(np.uint8), bitorder="little")
                assert set(np.flatnonzero(bits).tolist()) == walks.allowed(twin, letters)
            shared += kept is not None
        else:
            assert matcher.row() is None
    assert passed > 20 and refused > 20 and shared > 20


def test_what_is_not_known_yet_or_ends_the_output_is_not_passed(letters, walks):
    a, end = letters.ids_of_bytes[b"a"], letters.eos_ids[0]
    grammar = walks.compile("[ab]{2,3}", letters)
    matcher = grammar.matcher()
    assert not matcher.passes(a, False)
    assert matcher.accept(a) and not matcher.is_done()
    matcher.rollback(1)
    assert matcher.passes(a, True)
    learn_all(grammar)
    assert matcher.passes(a, True) and matcher.can_end()
    assert not matcher.passes(a, True)  # it would be done
    assert not matcher.passes(end, False) and not matcher._ended
    assert matcher.accept(end) and not matcher.passes(a, False)


def test_a_plan_is_followed_by_what_passes(real, walks):
    """Masks stay narrowed to the model's own tokens where they come one by one."""
    grammar = walks.compile("[xy]The answer is orderly[0-9]", real)
    learn_all(grammar)
    matcher, twin = grammar.matcher(), grammar.matcher()
    passed = 0
    for token in real.encode(b"x") + real.encode(b"The answer is orderly"):
        [token] = [token] if not passed else walks.allowed(matcher, real)
        assert matcher.passes(token, False) and twin.accept(token)
        assert walks.allowed(matcher, real) == walks.allowed(twin, real)
        assert (matcher._plan, matcher._next) == (twin._plan, twin._next)
        passed += 1
        if len(walks.allowed(matcher, real)) > 1:
            break
    assert passed > 3


def test_the_whole_row_is_written_whatever_was_in_it(real, walks):
    grammar = walks.compile("[ab]c", real)
    row, wide = np.full(real.words, -1, np.int32), np.full(real.words + 3, -1, np.int32)
    matcher = grammar.matcher()
    matcher.fill(row)
    matcher.fill(wide)
    assert (wide[: real.words] == row).all() and not wide[real.words :].any()
    assert 0 < int(np.unpackbits(row.view(np.uint8)).sum()) < 10
    with pytest.raises(ValueError):
        matcher.fill(np.zeros(real.words - 1, np.int32))


def test_rows_kept_are_bounded(letters, walks, monkeypatch):
    monkeypatch.setattr(state_matcher, "MAX_ROW_BYTES", 0)
    text = "".join(random.Random(1).choices("abB0 ", k=60))
    grammar = walks.compile(f"{text}b?", letters)
    matcher = grammar.matcher()
    for letter in text:
        assert matcher.accept(letters.ids_of_bytes[letter.encode()])
        matcher.can_end()
    assert len(grammar._states) == 16
    matcher.rollback(60)
    assert walks.takes(grammar, letters, text + "b")


def test_plans_kept_are_bounded_and_counted(letters, walks, monkeypatch):
    monkeypatch.setattr(state_matcher, "_PLANNED", 100)
    grammar = walks.compile("([ab]!{3}){40}", letters)
    before, planned = grammar.nbytes, 0
    matcher = grammar.matcher()
    for _ in range(40):
        assert matcher.accept(letters.ids_of_bytes[b"a"])
        forced = matcher.forced_tokens([])
        planned += len(forced)
        assert all(matcher.accept(token) for token in forced)
    assert planned == 120
    assert 50 < grammar._planned <= 100
    assert before + 50 * 40 < grammar.nbytes <= before + 100 * 40


def test_what_crosses_from_the_worker_is_the_same_grammar(real, walks):
    backend, spec = walks.backend, Spec.of("regex", r"(item|itemise) [0-9]{1,3}(, ok)?")
    bare = Vocabulary(real.tokens, size=real.size, eos_ids=real.eos_ids)
    grammar = backend.finish(spec, real, backend.try_in_worker(spec, bare))
    assert walks.takes(grammar, real, "itemise 12, ok") and grammar.nbytes > 10_000
    assert [real.tokens[i] for i in grammar.matcher().forced_tokens([])] in ([b"item"], [])


def test_other_kinds_are_not_for_it(walks):
    backend = walks.backend
    assert "json_schema" in (backend.supports(Spec.of("json_schema", {})) or "")
    assert backend.supports(Spec.of("regex", "a+")) is None
    assert backend.supports(Spec.of("choice", ["a"])) is None
    for wrong in (Spec.of("regex", "a("), Spec.of("choice", "[]")):
        with pytest.raises(GrammarError):
            backend.supports(wrong)


def test_characters_the_model_cannot_write_lead_into_no_dead_end(real, walks):
    assert {0x04, 0xF1} <= real.missing_bytes
    grammar = walks.compile(r"[\x04a\U00050000]bc", real)
    assert walks.takes(grammar, real, "abc")
    assert b"".join(real.tokens[i] for i in grammar.matcher().forced_tokens([])) == b"abc"
    for pattern in ("x\x04y", "[\U00050000-\U00060000]"):
        with pytest.raises(GrammarError, match="no token"):
            walks.compile(pattern, real)


def test_random_choices_are_written_and_nothing_else(real, walks):
    rng = random.Random(11)
    for _ in range(20):
        choices = {
            "".join(rng.choice(["a", "the", " ", "é", "日", "!", "order"]) for _ in range(size))
            for size in range(1, 8)
        }
        text = json.dumps(sorted(choices), ensure_ascii=False)
        grammar = walks.backend.compile(Spec.of("choice", text), real)
        for choice in choices:
            assert walks.takes(grammar, real, choice)
            for near in (choice + "a", choice[:-1], choice[1:]):
                assert walks.takes(grammar, real, near) == (near in choices)
