"""Pieces of text as tokens come, whatever the tokens' borders."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ramet.runtime.gateway.detokenizer import Detokenizer, find_stop

quick = settings(max_examples=300, deadline=None)
alphabet = st.sampled_from(["a", "b", "c", "ab", "é", "日本", "🦊", "👩‍👧", " ", "\n"])
texts = st.lists(alphabet, max_size=12).map("".join)
stop_lists = st.lists(st.lists(alphabet, min_size=1, max_size=3).map("".join), max_size=3).map(
    tuple
)


@st.composite
def cut(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """Tokens that join to ``data``, cut anywhere, also inside characters."""
    borders = draw(st.lists(st.integers(0, len(data)), max_size=8).map(sorted))
    ends = [0, *borders, len(data)]
    return [data[a:b] for a, b in pairwise(ends)]


def run(tokens: list[bytes], stops: tuple[bytes, ...], text_bytes: int = -1) -> list[str]:
    detokenizer = Detokenizer(tokens, stops=stops)
    pieces = [detokenizer.push([i]) for i in range(len(tokens))]
    pieces.append(detokenizer.finish(text_bytes))
    assert "".join(pieces) == detokenizer.text
    return pieces


def first_stop(data: bytes, stops: tuple[bytes, ...]) -> int:
    """Where the text ends when bytes come one by one and the first completed stop ends it."""
    for end in range(len(data) + 1):
        begins = [end - len(s) for s in stops if data[:end].endswith(s)]
        if begins:
            return min(begins)
    return -1


@quick
@given(data=st.data(), text=texts, stops=stop_lists)
def test_pieces_join_to_the_text_before_the_stop(
    data: st.DataObject, text: str, stops: tuple[str, ...]
) -> None:
    raw = text.encode()
    stop_bytes = tuple(stop.encode() for stop in stops)
    end = first_stop(raw, stop_bytes)
    pieces = run(data.draw(cut(raw)), stop_bytes)
    assert "".join(pieces) == (raw[:end] if end >= 0 else raw).decode()
    assert not any("\ufffd" in piece for piece in pieces)


@quick
@given(data=st.data(), text=texts, stops=stop_lists)
def test_a_stop_is_never_shown_in_part(
    data: st.DataObject, text: str, stops: tuple[str, ...]
) -> None:
    """At every moment what has been shown is a beginning of the final text."""
    raw = text.encode()
    stop_bytes = tuple(stop.encode() for stop in stops)
    tokens = data.draw(cut(raw))
    final = "".join(run(tokens, stop_bytes))
    detokenizer = Detokenizer(tokens, stops=stop_bytes)
    for number in range(len(tokens)):
        detokenizer.push([number])
        assert final.startswith(detokenizer.text)


@quick
@given(data=st.data(), raw=st.binary(max_size=20))
@example(data=None, raw=b"\xf0\x9f\xa6")
def test_broken_bytes_show_as_they_would_at_once(data: st.DataObject | None, raw: bytes) -> None:
    tokens = data.draw(cut(raw)) if data is not None else [raw[:1], raw[1:]]
    assert "".join(run(tokens, ())) == raw.decode("utf-8", "replace")


@quick
@given(data=st.data(), text=texts, count=st.integers(0, 30))
def test_the_end_that_the_engine_counted(data: st.DataObject, text: str, count: int) -> None:
    """The engine matches stops itself and tells how many bytes are text; the stop strings are known
    here too, so that nothing beyond that count has been shown."""
    raw = text.encode()
    stops = (b"b\n", "🦊".encode())
    end = first_stop(raw, stops)
    tokens = data.draw(cut(raw))
    assert "".join(run(tokens, stops, end)) == (raw[:end] if end >= 0 else raw).decode()
    alone = Detokenizer([raw])
    assert alone.push([]) + alone.finish(count) == ""


def test_a_cut_before_the_held_bytes() -> None:
    detokenizer = Detokenizer([b"hello wor"], stops=(b"world",))
    assert detokenizer.push([0]) == "hello "
    assert detokenizer.finish(7) == "w"
    assert detokenizer.text == "hello w"


def test_characters_wait_for_their_last_byte() -> None:
    fox = "🦊".encode()
    detokenizer = Detokenizer([fox[:1], fox[1:3], fox[3:], b"x"])
    assert [detokenizer.push([i]) for i in range(4)] == ["", "", "🦊", "x"]


def test_nothing_comes_after_a_stop() -> None:
    detokenizer = Detokenizer([b"one\n\n", b"two"], stops=(b"\n\n",))
    assert detokenizer.push([0]) == "one"
    assert detokenizer.stopped
    assert detokenizer.push([1]) == ""
    assert detokenizer.finish() == ""


def test_a_stop_that_did_not_come_is_shown_at_the_end() -> None:
    detokenizer = Detokenizer([b"wait for #", b"#"], stops=(b"###",))
    assert detokenizer.push([0]) == "wait for "
    assert detokenizer.push([1]) == ""
    assert detokenizer.finish() == "##"


def test_special_tokens() -> None:
    table = [b"a", b"", b"b"]
    hidden = Detokenizer(table, {1}, True)
    assert hidden.push([0, 1, 2]) == "ab"
    shown = Detokenizer(table, {1}, False, special_text={1: b"<|eot|>"})
    assert shown.push([0, 1, 2]) == "a<|eot|>b"


@pytest.mark.parametrize(
    ("data", "stops", "expected"),
    [
        (b"abc", (b"c", b"bc"), (1, 3, 1)),
        (b"abcab", (b"cab", b"b"), (1, 2, 1)),
        (b"aXbYc", (b"Y", b"X"), (1, 2, 1)),
        (b"abc", (b"d",), None),
        (b"abc", (b"",), None),
        (b"aXbX", (b"X",), (1, 2, 0)),
    ],
)
def test_find_stop(
    data: bytes, stops: tuple[bytes, ...], expected: tuple[int, int, int] | None
) -> None:
    assert find_stop(data, stops) == expected


def test_find_stop_from_a_position() -> None:
    assert find_stop(b"aXbX", (b"X",), 2) == (3, 4, 0)
