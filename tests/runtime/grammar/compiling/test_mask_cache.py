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


def test_a_second_output_computes_nothing(backend, small):
    grammar = backend.compile(SPECS[0], small)
    text = small.encode(json.dumps({"name": "ab", "kind": "beta"}, separators=(",", ":")).encode())
    rows = []
    for turn in range(2):
        matcher = grammar.matcher()
        if turn:
            matcher.inner = Silent(matcher.inner)
        for token in text:
            row = row_of(matcher, small)
            if turn:
                assert np.array_equal(row, rows.pop(0))
            else:
                rows.append(row)
            assert matcher.accept(token)
    assert not rows


class Silent:
    """llguidance's matcher, if it could not compute masks."""

    def __init__(self, inner) -> None:
        self._inner = inner

    def __getattr__(self, name: str):
        assert "mask" not in name
        return getattr(self._inner, name)


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
