"""What outlines-core's index alone is about: its size, its limits, its marker."""

from __future__ import annotations

import time

import pytest
from ramet.runtime.grammar import outlines_backend
from ramet.runtime.grammar.backend import Refused
from ramet.runtime.grammar.index_size import expected_ways
from ramet.runtime.grammar.outlines_backend import OutlinesBackend
from ramet.runtime.grammar.spec import Spec


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"[a-z]{3000}", "characters when written out"),
        (r"[ab]*a[ab]{20}", "states"),
        (r"\w{0,60}", "states|long"),
        (r"[^\n]{0,400}", "states|long|8 MB"),
        (r"[^\n]{0,40}", "8 MB"),
    ],
)
def test_what_is_large_is_left_to_another_backend(pattern, reason, real):
    backend, spec = OutlinesBackend(), Spec.of("regex", pattern)
    with pytest.raises(Refused, match=reason):
        backend.try_in_worker(spec, real)


@pytest.mark.parametrize(
    "pattern",
    ["[a-z]{40}", r'"[^"\n]*"', ".{0,9}", r'"[\w\d\s]*"', '\\{"a": "[a-z ]{0,10}"\\}', r"\w+ \w+"],
)
def test_the_size_of_an_index_is_foreseen(pattern, real):
    grammar = OutlinesBackend().compile(Spec.of("regex", pattern), real)
    index = grammar.index.__reduce__()[1][0]
    expected = 6 * expected_ways(grammar.automaton, real)
    assert expected / 2 < len(index) < expected * 2


def test_an_index_over_the_limit_is_refused_although_it_was_built(letters, monkeypatch):
    monkeypatch.setattr(outlines_backend, "MAX_INDEX_BYTES", 200)
    with pytest.raises(Refused, match="MB"):
        OutlinesBackend().try_in_worker(Spec.of("regex", "(aa|bb|ab){9}"), letters)


@pytest.mark.parametrize(
    "pattern",
    ["(?s).{0,12}", "((?i:.){,2}?){0,3}", "[^#]{0,14}#", r"(\W{0,3}|a)B", "(?s)(.?.?.?){4}"],
)
def test_patterns_that_hold_the_marker_build_fast(pattern, single_bytes):
    """The library would take minutes for these behind a marker that the pattern can hold."""
    start = time.process_time()
    OutlinesBackend().compile(Spec.of("regex", pattern), single_bytes)
    assert time.process_time() - start < 5
