"""One text with many ends: each is cut as if it had been cut alone."""

from __future__ import annotations

import asyncio
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from ramet.runtime.gateway import cutting
from ramet.runtime.gateway.cutting import WORTH_SPLITTING, Cutter, Ends, Known, in_turns
from ramet.runtime.gateway.tokenizer import Tokenizer
from tokenizers import models, pre_tokenizers

WORDS = [
    "the quick", " fox", " jumps over", "  1234", " wörld", " 日本語の テキスト", "\n\n\tpass",
    " x", " don't", "<|im_end|>", "<wide>", " <tool> a", "a b c", " \n b", "é", " e\u0301 f",
    "42 times", " THE END ", "   ", " and the", "the the the",
]  # fmt: skip
ENDS = ["", " fox", "fox", "\u0301x", " ", "  and", "1", "<|im_end|>", "'t", "\n", "é", "ssistant"]

pieces = st.lists(
    st.tuples(st.sampled_from(WORDS), st.booleans())
    | st.integers(20, 200).map(lambda n: np.array([n, n + 1], np.int32)),
    max_size=8,
)


def encoded_at_once(tokenizer: Tokenizer, items: list[Any], before: Any, start: bool) -> list[int]:
    """What is between given tokens is encoded as one."""
    tokens: list[int] = []
    run: list[Any] = []
    for item in [*items, None]:
        if isinstance(item, tuple):
            run.append(item)
            continue
        if any(text for text, _ in run):
            last = tokens[-1] if tokens else before
            tokens += tokenizer.encode_segments(run, start=start and last is None, after=last)
        run = []
        if item is not None:
            tokens += item.tolist()
    return tokens


def with_ends(cutter: Cutter, ends: list[Any]) -> list[list[int]]:
    """All tokens with each end."""
    whole = cutter.whole()
    cut = Ends(cutter, whole, len(ends) > 1)
    return [whole[:kept] + row for kept, row in map(cut.cut, ends)]


def check(
    tokenizer: Tokenizer, items: list[Any], ends: list[str], before: Any, special: bool
) -> None:
    found = with_ends(Cutter(tokenizer, items, before, True), [(end, special) for end in ends])
    for end, got in zip(ends, found, strict=True):
        assert got == encoded_at_once(tokenizer, [*items, (end, special)], before, True), end


@settings(max_examples=200, deadline=None)
@given(items=pieces, before=st.sampled_from([None, 30]), special=st.booleans(), data=st.data())
def test_every_end_as_if_alone(
    tokenizer: Tokenizer, items: list[Any], before: Any, special: bool, data: Any
) -> None:
    if data.draw(st.booleans()):
        items = [(" lazy dog." * 40, special), *items]  # long enough to be worth it
    check(tokenizer, items, ENDS, before, special)


def counted(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sizes: list[int] = []
    encode = tokenizer.encode_segments

    def count(segments: Any, **options: Any) -> list[int]:
        segments = list(segments)
        sizes.append(sum(len(text) for text, _ in segments))
        return encode(segments, **options)

    monkeypatch.setattr(tokenizer, "encode_segments", count)
    return sizes


def test_a_long_text_is_not_cut_for_every_end(
    byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 50
    ends = [f"Number {i}" for i in range(100)]
    want = [encoded_at_once(byte_tokenizer, [(text + end, True)], None, True) for end in ends]
    sizes = counted(byte_tokenizer, monkeypatch)
    items = [(text, True)]
    assert with_ends(Cutter(byte_tokenizer, items, None, True), [(e, True) for e in ends]) == want
    assert sum(sizes) < 5 * len(text)
    # Nor is it where it comes before tokens that were generated.
    sizes.clear()
    items = [(text, True), np.array([40, 41], np.int32), (" so", True)]
    with_ends(Cutter(byte_tokenizer, items, None, True), [(e, True) for e in ends])
    assert sum(sizes) < 2 * len(text)
    assert len(text) > WORTH_SPLITTING


def test_where_tokens_hold_several_words_all_is_cut_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A vocabulary with "a b": what stands before a blank depends on what comes behind it."""
    symbols = ["a", "b", "c", "Ġ", "Ġb", "Ġc", "aĠb", "Ġca"]
    merges = [("Ġ", "b"), ("a", "Ġb"), ("Ġ", "c"), ("Ġc", "a")]
    model = models.BPE({symbol: i for i, symbol in enumerate(symbols)}, merges)
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(inner)
    assert not tokenizer.words_are_apart
    items = [("a ca" * 200 + "a c", True)]
    check(tokenizer, items, ["", "a b", "a", " b"], None, True)
    sizes = counted(tokenizer, monkeypatch)
    with_ends(Cutter(tokenizer, items, None, True), [("b", True), ("a", True)])
    assert min(sizes) >= 803


def test_what_goes_on_from_tokens_gets_no_blank_of_its_own(
    trained: dict[str, tokenizers.Tokenizer],
) -> None:
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(trained["legacy"].to_str()))
    ids = Cutter(tokenizer, [("fox", True)], 30, True).whole()
    assert b"".join(map(tokenizer.token_bytes, ids)) == b"fox"
    ids = Cutter(tokenizer, [("fox", True)], None, True).whole()
    assert b"".join(map(tokenizer.token_bytes, ids)) == b" fox"


@settings(max_examples=100, deadline=None)
@given(items=pieces, before=st.sampled_from([None, 30]), end=st.sampled_from(ENDS))
def test_what_stays_is_all_that_stays(
    tokenizer: Tokenizer, items: list[Any], before: Any, end: str
) -> None:
    cutter = Cutter(tokenizer, items, before, True)
    whole = cutter.whole()
    kept, row = Ends(cutter, whole).cut((end, False))
    assert kept == len(whole) or not row or whole[kept] != row[0]


def test_many_ends_of_a_long_text_take_the_room_of_the_ends(byte_tokenizer: Tokenizer) -> None:
    cutter = Cutter(byte_tokenizer, [("x" * 20_000, True)], None, True)
    whole = cutter.whole()
    ends = Ends(cutter, whole)
    tracemalloc.start()
    try:
        found = [ends.cut((f"{number}", True)) for number in range(50)]
        # Of this thread's work alone: what other tests left running allocates too.
        ours = tracemalloc.take_snapshot().filter_traces(
            [tracemalloc.Filter(True, cutting.__file__)]
        )
        assert 0 < sum(trace.size for trace in ours.traces) < 100_000
    finally:
        tracemalloc.stop()
    assert {kept for kept, _ in found} == {len(whole)}


async def test_long_work_stops_with_who_waits_for_it() -> None:
    done: list[int] = []

    def work(number: int) -> int:
        done.append(number)
        time.sleep(0.01)
        return number

    async def all_of_it() -> list[int]:
        return [one async for one in in_turns(work, range(1000), lambda _: 600_000)]

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(all_of_it(), 0.05)
    reached = len(done)
    await asyncio.sleep(0.05)
    assert 0 < len(done) <= reached + 1
    done.clear()
    assert [one async for one in in_turns(work, range(5), lambda _: 300_000)] == [*range(5)]


@pytest.mark.parametrize("text", ["ab", " x", "cd<|bos|>z", "abcd " * 80])
def test_what_a_program_has_cut_before_is_cut_the_same(byte_tokenizer, monkeypatch, text):
    known = Known(byte_tokenizer)
    items = [(text, True), ("ll", False)]
    special = min(byte_tokenizer.special_ids)
    for before in (97, special, 97, special):
        plain = Cutter(byte_tokenizer, items, before, False).whole()
        assert Cutter(byte_tokenizer, items, before, False, known).whole() == plain
        assert known.anywhere(items) == byte_tokenizer.encode_anywhere(items)
    asked = []
    monkeypatch.setattr(byte_tokenizer, "encode_segments", lambda run, **_: asked.append(run) or [])
    Cutter(byte_tokenizer, items, 97, False, known).whole()
    assert len(asked) == (len(text) > 256)
