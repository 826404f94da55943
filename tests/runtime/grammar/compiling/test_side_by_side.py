"""The guides of a step together: what each does alone, whoever does it."""

from __future__ import annotations

import contextlib
import random
from types import SimpleNamespace

import numpy as np
import pytest
from ramet.runtime.engine.guides import Guide
from ramet.runtime.engine.together import ANYTHING, MANY_STEPS, Job, Together
from ramet.runtime.grammar.llguidance_backend import LLGuidanceBackend
from ramet.runtime.grammar.side_by_side import catch_up
from ramet.runtime.grammar.spec import Spec
from ramet.runtime.grammar.vocabulary import Vocabulary
from ramet.runtime.protocol import GrammarError

SPECS = [
    ("json_schema", {"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 2}),
    ("json_schema", {"type": "object", "properties": {"a": {"enum": [1, "two", None]}},
                     "required": ["a"], "additionalProperties": {"type": "number"}}),
    ("regex", "[a-f]{3,9}x?"),
]  # fmt: skip


@pytest.fixture
def endless() -> Vocabulary:
    """Nothing ends an answer, and the library has no ids for more than the bytes."""
    return Vocabulary([bytes((i,)) for i in range(256)], size=256, eos_ids=[])


class Watched(Together):
    """Counts what was done side by side."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self._seconds = 1.0
        self.filled = self.accepted = 0
        side = self._side

        def fill(masks, wanted):
            self.filled += len(wanted)
            side.fill(masks, wanted)

        def accept(wanted):
            self.accepted += len(wanted)
            return side.accept(wanted)

        self._side = SimpleNamespace(fill=fill, accept=accept)


def guides_of(vocabulary, count):
    backend = LLGuidanceBackend()
    grammars = [backend.compile(Spec.of(*spec), vocabulary) for spec in SPECS]
    matchers = [grammars[i % len(grammars)].matcher() for i in range(count)]
    return [Guide(matcher, vocabulary.eos_ids) for matcher in matchers]


def jobs_for(guides):
    return [Job(i, guide, i) for i, guide in enumerate(guides)]


def choices(row) -> list[int]:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def a_step(together, ours, theirs, vocabulary, rng):
    """Masks and tokens of guides together, and of their twins alone: the same. Who is not done."""
    masks = np.full((len(ours), vocabulary.words), 7, np.int32)
    assert together.fill(jobs_for(ours), masks) == []
    want = np.full_like(masks, 9)
    for guide, row in zip(theirs, want):
        guide.fill(row)
    np.testing.assert_array_equal(masks, want)
    tokens = [rng.choice(choices(row)) for row in masks]
    together.accept(list(zip(ours, tokens)))
    for mine, other, token in zip(ours, theirs, tokens):
        mine.accept(token, vocabulary.tokens[token])
        other.accept(token, vocabulary.tokens[token])
        assert (mine.done, mine.ended) == (other.done, other.ended)
    alive = [i for i, guide in enumerate(ours) if not guide.done]
    return [ours[i] for i in alive], [theirs[i] for i in alive]


@pytest.mark.parametrize("which", ["small", "endless", "real"])
def test_masks_and_steps_are_those_of_each_alone(which, request):
    vocabulary = request.getfixturevalue(which)
    rng, count = random.Random(1), 2 * MANY_STEPS
    ours, theirs = guides_of(vocabulary, count), guides_of(vocabulary, count)
    together = Watched(3)
    for _ in range(12):
        ours, theirs = a_step(together, ours, theirs, vocabulary, rng)
        if len(ours) < MANY_STEPS:
            break
    assert together.accepted > MANY_STEPS
    assert together.filled > 0 or which == "endless"


def test_one_that_fails_is_asked_again(small):
    guides = guides_of(small, MANY_STEPS)
    together = Together(2)
    together._side = SimpleNamespace(accept=lambda wanted: [False] * len(wanted))
    together.accept([(guide, ord("[")) for guide in guides[::3] * 3])
    for guide in guides[::3]:
        guide.accept(ord("["), b"[")
        guide.accept(ord('"'), b'"')  # which comes after that one alone
        guide.accept(ord('"'), b'"')
        with pytest.raises(GrammarError, match="does not go on"):
            guide.accept(ord("]"), b"]")


def test_a_matcher_in_error_begins_anew(small):
    guides, twins = guides_of(small, MANY_STEPS), guides_of(small, MANY_STEPS)
    for guide in guides:
        assert guide.beside is not None
        guide.beside.inner.consume_token(0)  # the library never leaves this state
        assert guide.beside.inner.is_error()
    masks = np.zeros((MANY_STEPS, small.words), np.int32)
    together = Watched(2)
    assert together.fill(jobs_for(guides), masks) == []
    for twin, row in zip(twins, masks):
        want = np.zeros_like(row)
        twin.fill(want)
        np.testing.assert_array_equal(row, want)


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_rows_that_fail_allow_anything_and_are_named(seconds, small):
    def broken(_row):
        raise RuntimeError("a library's own")

    def nothing_left(_row):
        raise GrammarError("nothing is left")

    good = guides_of(small, 3)
    bad = [SimpleNamespace(beside=None, fill=f) for f in (broken, nothing_left)]
    worse = [SimpleNamespace(beside=SimpleNamespace(computes=f), fill=f) for f in (broken,)]
    together = Together(2)
    together._seconds = seconds
    masks = np.zeros((6, small.words), np.int32)
    failed = together.fill(jobs_for([*bad, *good, *worse]), masks)
    assert sorted(request for request, _ in failed) == [0, 1, 5]
    assert all(isinstance(error, GrammarError) for _, error in failed)
    assert (masks[[0, 1, 5]] == ANYTHING).all()
    assert not (masks[2:5] == ANYTHING).all(1).any()
    assert together.fill([], masks) == []


def test_what_the_library_refuses_to_do_at_once_each_does_alone(small):
    """It raises for all of them where one is in use; some of them may have gone on by then."""

    class HalfWay(Together):
        def __init__(self) -> None:
            super().__init__(2)
            self._seconds = 1.0
            side = self._side

            def fill(masks, wanted):
                side.fill(masks, wanted[::2])
                raise RuntimeError("Already borrowed")

            def accept(wanted):
                side.accept(wanted[::2])
                raise RuntimeError("Already borrowed")

            self._side = SimpleNamespace(fill=fill, accept=accept)

    together = HalfWay()
    guides, twins = (guides_of(small, 2 * MANY_STEPS) for _ in range(2))
    rng = random.Random(2)
    for _ in range(4):
        guides, twins = a_step(together, guides, twins, small, rng)


@pytest.mark.parametrize(("threads", "seconds"), [(1, 1.0), (3, 0.0)])
def test_what_is_quick_or_has_no_threads_stays_alone(threads, seconds, small, monkeypatch):
    monkeypatch.setattr("ramet.runtime.engine.together.WORTH_THREADS", 10.0)
    together = Watched(threads)
    together._seconds = seconds
    count = 2 * MANY_STEPS if threads == 1 else MANY_STEPS - 1
    guides = guides_of(small, count)
    masks = np.zeros((count, small.words), np.int32)
    together.fill(jobs_for(guides), masks)
    together.accept([(guide, choices(row)[0]) for guide, row in zip(guides, masks)])
    assert (together.filled, together.accepted) == (0, 0)


def test_how_long_a_mask_takes_is_learnt(small):
    together = Together(2)
    guides = guides_of(small, 3)
    for _ in range(30):
        together.fill(jobs_for(guides), np.zeros((3, small.words), np.int32))
    assert 0 < together._seconds < 0.001


def test_outputs_at_one_place_are_computed_once(small):
    guides = guides_of(small, 5 * len(SPECS))
    together = Watched(3)
    masks = np.zeros((len(guides), small.words), np.int32)
    assert together.fill(jobs_for(guides), masks) == []
    assert together.filled == len(SPECS)
    for i, row in enumerate(masks):
        np.testing.assert_array_equal(row, masks[i % len(SPECS)])
        assert 0 < len(choices(row)) < 300


def test_what_turns_out_to_take_long_goes_on_at_once(small, monkeypatch):
    monkeypatch.setattr("ramet.runtime.engine.together.WORTH_THREADS", 1e-9)
    guides = guides_of(small, len(SPECS))
    together = Watched(2)
    together._seconds = 0.0
    masks = np.zeros((len(guides), small.words), np.int32)
    assert together.fill(jobs_for(guides), masks) == []
    assert together.filled == len(SPECS) - 1
    assert together._seconds > 0
    for guide, row in zip(guides_of(small, len(SPECS)), masks):
        guide.fill(want := np.zeros_like(row))
        np.testing.assert_array_equal(row, want)


def test_what_is_known_is_not_taken_again(small):
    ours = guides_of(small, 2 * MANY_STEPS)
    theirs = [Guide(guide.beside._grammar.matcher(), small.eos_ids) for guide in ours]
    together = Watched(2)
    tokens = [ord("[{a"[i % 3]) for i in range(len(ours))]
    for turn in (ours, theirs):
        together.accept(list(zip(turn, tokens)))
        assert together.accepted == len(tokens)
        for guide, token in zip(turn, tokens):
            guide.accept(token, bytes((token,)))
            assert not guide.done


@pytest.mark.parametrize("broken", [False, True])
def test_what_is_known_but_not_read_is_read_at_once(broken, small):
    grammar = LLGuidanceBackend().compile(Spec.of("regex", "[a-f]{3,9}x?"), small)
    known = grammar.matcher()
    assert all(map(known.accept, b"abcdef"))
    matchers = [grammar.matcher() for _ in range(6)]
    for i, matcher in enumerate(matchers):
        assert all(map(matcher.accept, b"abcdef"[: i + 1]))
        assert matcher._unread == i + 1

    class Executor:
        """Breaks down in the middle, if so."""

        def __init__(self) -> None:
            self.turns = 0

        def consume_token_par(self, pairs):
            self.turns += 1
            if broken and self.turns == 3:
                raise RuntimeError("Already borrowed")
            for inner, token in pairs:
                assert inner.consume_token(token)

    executor = Executor()
    with pytest.raises(RuntimeError) if broken else contextlib.nullcontext():
        catch_up(executor, matchers)
    for i, matcher in enumerate(matchers):
        assert matcher._unread == 0
        assert matcher.can_end() == (i >= 2)
        assert matcher.accept(ord("b"))
        assert all(map(matcher.accept, b"a" * (7 - i)))
        assert not matcher.accept(ord("a"))
        assert matcher.accept(ord("x"))
    assert executor.turns == (3 if broken else 6)


def test_who_takes_ever_longer_fails_alone_though_all_are_computed_at_once(small, monkeypatch):
    monkeypatch.setattr("ramet.runtime.grammar.llguidance_matcher.CALL_SECONDS", 0.001)
    monkeypatch.setattr("ramet.runtime.grammar.llguidance_matcher.MOST_OWED", 0.1)
    monkeypatch.setattr("ramet.runtime.grammar.side_by_side.SUSPECT_SECONDS", 0.001)
    backend = LLGuidanceBackend()
    grammars = [
        'root ::= x x | "a" | "b"\nx ::= root root | root',
        'root ::= root "a" | root "b" | "a" | "b" | "(" root ")"',
    ]
    made = [backend.compile(Spec("ebnf", text), small) for text in grammars]
    guides = [Guide(made[i > 0].matcher(), small.eos_ids) for i in range(MANY_STEPS + 1)]
    together = Watched(2)
    together._seconds = 1.0
    masks = np.zeros((len(guides), small.words), np.int32)
    failed = []
    for step in range(3000):
        token = ord("ab"[step % 2])
        failed = together.fill(jobs_for(guides), masks)
        if failed:
            break
        together.accept([(guide, token) for guide in guides])
        try:
            for at in range(len(guides)):
                guides[at].accept(token, bytes((token,)))
        except GrammarError as error:
            failed = [(at, error)]
            break
    [(who, error)] = failed
    assert who == 0
    assert "too ambiguous" in str(error)
    assert together.filled > 0
    assert together.accepted > 0


def test_rows_behind_what_is_not_read_yet_are_computed_at_once(small):
    backend = LLGuidanceBackend()
    grammar, fresh = (backend.compile(Spec.of("regex", "a[a-c][d-f]g{2,5}"), small) for _ in "ab")
    known = grammar.matcher()
    assert all(map(known.accept, b"aceg"))
    guides, masks = [], np.zeros((5, small.words), np.int32)
    for count in range(5):
        matcher, twin = grammar.matcher(), fresh.matcher()
        for token in b"aceg"[:count]:
            assert matcher.accept(token)
            assert twin.accept(token)
        guides.append((Guide(matcher, small.eos_ids), twin))
    together = Watched(2)
    assert together.fill(jobs_for([guide for guide, _ in guides]), masks) == []
    assert together.filled == 5
    for (_, twin), row in zip(guides, masks):
        twin.fill(want := np.zeros_like(row))
        np.testing.assert_array_equal(row, want)
