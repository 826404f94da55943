"""Stop strings on bytes, token by token."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from ramet.runtime.engine.stops import StopMatcher

text = st.text("ab€", max_size=30).map(str.encode)
stops = st.lists(st.text("ab€", min_size=1, max_size=4).map(str.encode), min_size=1, max_size=3)


def first_completed(data: bytes, wanted) -> tuple[bytes, int] | None:
    for end in range(1, len(data) + 1):
        found = [s for s in wanted if data[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return longest, end - len(longest)
    return None


@given(data=text, wanted=stops, cuts=st.lists(st.integers(0, 90), max_size=20))
def test_any_split_finds_the_stop_that_completes_first(data, wanted, cuts):
    edges = sorted({0, len(data), *(c for c in cuts if c < len(data))})
    matcher = StopMatcher(tuple(wanted))
    hit = None
    for begin, end in pairwise(edges):
        hit = matcher.push(data[begin:end])
        if hit is not None:
            break
    want = first_completed(data, wanted)
    if want is None:
        assert hit is None
    else:
        assert hit == want


@given(data=text, wanted=stops, cuts=st.lists(st.integers(0, 90), max_size=20))
def test_who_goes_on_after_a_hit_hears_of_later_stops_only(data, wanted, cuts):
    """Hits below the minimum are passed over; offsets stay right, and nothing comes twice."""
    edges = sorted({0, len(data), *(c for c in cuts if c < len(data))})
    matcher = StopMatcher(tuple(wanted))
    for begin, end in pairwise(edges):
        ends = [
            (stop_end, -len(stop), stop)
            for stop in wanted
            for stop_end in range(begin + 1, end + 1)
            if data[:stop_end].endswith(stop)
        ]
        hit = matcher.push(data[begin:end])
        if not ends:
            assert hit is None
        else:
            stop_end, _, stop = min(ends)
            assert hit == (stop, stop_end - len(stop))
