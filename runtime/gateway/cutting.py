"""A stream's open text cut into tokens, with one end or with many."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .history import Item, Segment
from .tokenizer import Tokenizer

WORTH_SPLITTING = 256
"""Characters of text. A shorter one is cut anew for every end."""
LONG = 50_000
"""Characters that are cut in a thread, so that other programs go on meanwhile."""
_MOST_KNOWN, _SHORT = 256, 256
"""Texts that a program's streams remember the tokens of, and characters of each."""
_A_TURN = 1_000_000
"""Characters cut in a thread before it is seen whether anybody waits for it still."""
_BETWEEN_WORDS = re.compile(r"(?<=[A-Za-z0-9]) (?=[A-Za-z])")

T = TypeVar("T")
R = TypeVar("R")


class Known:
    """Short texts of one program, which comes to them in many of its streams, and their tokens. (Of
    one, as who else wrote a text must not be told by the time that it takes.)"""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: dict[tuple[bool | None, tuple[Segment, ...]], list[int] | None] = {}

    def cut(self, run: Sequence[Segment], before: int) -> list[int]:
        """The tokens of a text behind the token ``before``. Not to be changed."""
        tokenizer = self._tokenizer
        key = before in tokenizer.special_ids, (*run,)
        ids = self._ids.get(key)
        if ids is None:
            ids = tokenizer.encode_segments(run, after=before)
            self._keep(key, ids)
        return ids

    def anywhere(self, run: Sequence[Segment]) -> list[int] | None:
        """The same behind any token; ``None`` where that matters."""
        key = None, (*run,)
        if key in self._ids:
            return self._ids[key]
        ids = self._tokenizer.encode_anywhere(run)
        self._keep(key, ids)
        return ids

    def _keep(self, key: tuple[bool | None, tuple[Segment, ...]], ids: list[int] | None) -> None:
        if len(self._ids) < _MOST_KNOWN and _characters(key[1]) <= _SHORT:
            self._ids[key] = ids


@dataclass(slots=True)
class Cutter:
    """``items`` go on from the token ``before``; ``None``: they are the beginning, and with
    ``start`` what the tokenizer puts before a text comes first."""

    tokenizer: Tokenizer
    items: list[Item]
    before: int | None
    start: bool
    known: Known | None = None
    """Short texts that were cut before."""

    @property
    def size(self) -> int:
        """Characters of text."""
        return _characters(self.items)

    def whole(self) -> list[int]:
        """Tokens of the items with nothing behind them."""
        return self.cut(self.items, self.before)

    def cut(self, items: Sequence[Item], before: int | None) -> list[int]:
        """Tokens of other items, which go on from the token ``before``."""
        tokens: list[int] = []
        run: list[Segment] = []
        for item in items:
            if isinstance(item, tuple):
                run.append(item)
            else:
                tokens += self._encode(run, tokens[-1] if tokens else before)
                tokens += item.tolist()
                run = []
        return tokens + self._encode(run, tokens[-1] if tokens else before)

    def _encode(self, run: Sequence[Segment], before: int | None) -> list[int]:
        run = [segment for segment in run if segment[0]]
        if not run:
            return []
        if before is not None and self.known is not None:
            return self.known.cut(run, before)
        start = self.start and before is None
        return self.tokenizer.encode_segments(run, start=start, after=before)


class Ends:
    """The items of a cutter with other texts behind them. ``whole`` is what they are without.

    All of a text is looked at for each end, unless with ``many`` its first part cannot be cut in
    another way whatever comes after it.
    """

    def __init__(self, cutter: Cutter, whole: list[int], many: bool = True) -> None:
        self._cutter = cutter
        self._settled, self._tail = (_split(cutter, whole) if many else None) or (0, cutter.items)
        self._rest = whole[self._settled :]
        self._before = whole[self._settled - 1] if self._settled else cutter.before
        self.size = _characters(self._tail)
        """Characters that are cut for each end, beside its own."""

    def cut(self, end: Segment) -> tuple[int, list[int]]:
        """How many leading tokens of the whole stay with this end, and what comes behind those."""
        tokens = self._cutter.cut([*self._tail, end], self._before)
        same = _common(self._rest, tokens)
        return self._settled + same, tokens[same:]


async def ends_of(cutter: Cutter, whole: list[int], many: bool) -> Ends:
    """Made in a thread where the text is long."""
    if cutter.size < LONG:
        return Ends(cutter, whole, many)
    return await asyncio.to_thread(Ends, cutter, whole, many)


def _characters(items: Sequence[Item]) -> int:
    return sum(len(item[0]) for item in items if isinstance(item, tuple))


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with."""
    for position, (token, other) in enumerate(zip(a, b)):
        if token != other:
            return position
    return min(len(a), len(b))


def _split(cutter: Cutter, whole: list[int]) -> tuple[int, list[Item]] | None:
    """How many tokens are the same whatever comes after the items, and the items behind them.

    They end with tokens that are given, or between two words: where no token of the vocabulary
    holds the end of a word and the blank behind it, none is made of both. What a tokenizer does
    beside that is seen by trying.
    """
    items = cutter.items
    if cutter.size < WORTH_SPLITTING:
        return None
    for i in range(len(items) - 1, -1, -1):
        item = items[i]
        if not isinstance(item, tuple):
            if not len(item):
                continue
            tail = items[i + 1 :]
            given = len(whole) - len(cutter.cut(tail, int(item[-1])))
            return given, tail
        text, special = item
        places = [m.start() for m in _BETWEEN_WORDS.finditer(text, max(len(text) - 400, 0))]
        if not places or not cutter.tokenizer.words_are_apart:
            continue
        at = places[-1]
        head = cutter.cut([*items[:i], (text[:at], special)], cutter.before)
        tail = [(text[at:], special), *items[i + 1 :]]
        if not head or head + cutter.cut(tail, head[-1]) != whole:
            return None
        return len(head), tail
    return None


async def in_turns(
    work: Callable[[T], R], things: Sequence[T], size: Callable[[T], int]
) -> AsyncIterator[R]:
    """``work`` of each thing, in order. ``size``: how many characters of text are cut for it. Many
    are cut in a thread, some at a time, so that others go on and one who is cancelled stops."""
    place = 0
    while place < len(things):
        begin, cost = place, 0
        while place < len(things) and (place == begin or cost + size(things[place]) <= _A_TURN):
            cost += size(things[place])
            place += 1
        turn = things[begin:place]
        done = _each(work, turn) if cost < LONG else await asyncio.to_thread(_each, work, turn)
        for result in done:
            yield result


def _each(work: Callable[[T], R], things: Sequence[T]) -> list[R]:
    return [work(thing) for thing in things]
