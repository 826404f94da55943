"""A stream's open text cut into tokens, with one end or with many."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .history import Item, Segment
from .tokenizer import Tokenizer

WORTH_SPLITTING = 256
"""Characters of text. A shorter one is cut anew for every end."""
_BETWEEN_WORDS = re.compile(r"(?<=[A-Za-z0-9]) (?=[A-Za-z])")


@dataclass(slots=True)
class Cutter:
    """``items`` go on from the token ``before``; ``None``: they are the beginning, and with
    ``start`` what the tokenizer puts before a text comes first."""

    tokenizer: Tokenizer
    items: list[Item]
    before: int | None
    start: bool

    def with_ends(self, ends: Sequence[Segment]) -> list[list[int]]:
        """For each end: the tokens of the items with it behind them. All of a text is looked at
        for each, unless its first part cannot be cut in another way whatever comes after it."""
        parts = self._split() if len(ends) > 2 else None
        if parts is None:
            return [self._cut([*self.items, end], self.before) for end in ends]
        head, tail = parts
        return [head + self._cut([*tail, end], head[-1]) for end in ends]

    def _split(self) -> tuple[list[int], list[Item]] | None:
        """Tokens that are the same whatever comes after the items, and the items behind them.

        They end with tokens that are given, or between two words: where no token of the vocabulary
        holds the end of a word and the blank behind it, none is made of both. What a tokenizer does
        beside that is seen by trying.
        """
        if sum(len(item[0]) for item in self.items if isinstance(item, tuple)) < WORTH_SPLITTING:
            return None
        for i in range(len(self.items) - 1, -1, -1):
            item = self.items[i]
            if not isinstance(item, tuple):
                head, tail = self.items[: i + 1], self.items[i + 1 :]
                return self._cut(head, self.before), tail
            text, special = item
            places = [m.start() for m in _BETWEEN_WORDS.finditer(text, max(len(text) - 400, 0))]
            if not places or not self.tokenizer.words_are_apart:
                continue
            at = places[-1]
            head = self._cut([*self.items[:i], (text[:at], special)], self.before)
            tail = [(text[at:], special), *self.items[i + 1 :]]
            if not head or head + self._cut(tail, head[-1]) != self._cut(self.items, self.before):
                return None
            return head, tail
        return None

    def _cut(self, items: Sequence[Item], before: int | None) -> list[int]:
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
        start = self.start and before is None
        return self.tokenizer.encode_segments(run, start=start, after=before)
