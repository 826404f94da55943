"""Token healing: taking back the last tokens of a text that the model might have cut otherwise.

A text that is cut after ``http:`` ends in tokens that the model never saw before ``//``: where
such a text goes on, it is one token, ``://``. So a prompt that is to be healed loses its last
tokens, as far back as a single token of the vocabulary could begin and run past the prompt's end,
and the output has to begin with their bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ..grammar.forced import runs_on
from ..grammar.vocabulary import Vocabulary
from ..protocol.messages import EngineSampling
from .request import IntArray
from .tokenizer import Tokenizer


class TakenBack(NamedTuple):
    """A prompt without its last ``taken`` tokens, whose bytes are ``prefix``."""

    prompt: IntArray
    taken: int = 0
    prefix: bytes = b""

    def sampling(self, resolved: EngineSampling) -> EngineSampling:
        """What the engine is told of it. At least as many tokens as were taken back come before
        those that ``min_new_tokens`` is about."""
        if not self.prefix:
            return resolved
        minimum = resolved.min_new_tokens
        return msgspec.structs.replace(
            resolved, heal=self.prefix, min_new_tokens=minimum + self.taken if minimum else 0
        )


class Healer:
    """For one tokenizer. Takes a while to make of a large one; safe between threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._table = tokenizer.bytes_table
        self._sorted = Vocabulary.from_tokenizer(tokenizer).sorted_tokens
        self._longest = max(map(len, self._sorted), default=0)
        # Those that a tokenizer finds whole, before it cuts anything.
        self._added = frozenset(tokenizer.inner.get_added_tokens_decoder())
        self.reach = 2 * self._longest + 1
        """Bytes at the end of a text that matter at most."""

    def take_back(
        self, prompt: IntArray, floor: int = 1, literal: bytes | None = None
    ) -> TakenBack:
        """``floor``: leading tokens that stay, one at least. ``literal``: the end of the prompt's
        text (its last `reach` bytes if there are more) before which no token is taken back; None:
        all of it. Special tokens stay, and what is before them."""
        first, data = self._reachable(prompt, max(floor, 1), literal)
        place = next((i for i in range(len(data)) if runs_on(self._sorted, data[i:])), len(data))
        tail = prompt[first:].tolist()
        count = _tokens_from(self._pieces(tail), place)
        if not count:
            return TakenBack(prompt)
        prefix = b"".join(self._pieces(tail[-count:]))
        return TakenBack(prompt[: len(prompt) - count], count, prefix)

    def _reachable(self, prompt: IntArray, floor: int, literal: bytes | None) -> tuple[int, bytes]:
        """The first token that may be taken back, and the bytes from there on."""
        first, data = len(prompt), b""
        while first > floor and len(data) < self._longest:
            token = int(prompt[first - 1])
            longer = self._table[token] + data
            if len(longer) == len(data) or (literal is not None and not literal.endswith(longer)):
                break
            if token in self._added and not runs_on(self._sorted, longer):
                break
            first, data = first - 1, longer
        return first, data

    def _pieces(self, ids: Sequence[int]) -> list[bytes]:
        return [self._table[token] for token in ids]


def _tokens_from(pieces: Sequence[bytes], place: int) -> int:
    """How many of the last pieces hold a byte from ``place`` on. They begin with a character: a
    grammar could not go on from half of one."""
    starts: list[int] = []
    at = 0
    for piece in pieces:
        starts.append(at)
        at += len(piece)
    data = b"".join(pieces)
    whole = [i for i, start in enumerate(starts) if data[start] & 0xC0 != 0x80]
    if place >= at or not whole:
        return 0
    from_place = max((i for i, start in enumerate(starts) if start <= place), default=0)
    before = [i for i in whole if i <= from_place]
    return len(pieces) - (before[-1] if before else whole[0])


def healed_tokens(tokens: Sequence[int], table: Sequence[bytes], prefix: int) -> int:
    """How many of an output's tokens hold nothing but what was taken back, of ``prefix`` bytes."""
    count = 0
    while prefix > 0 and count < len(tokens) and len(table[tokens[count]]) <= prefix:
        prefix -= len(table[tokens[count]])
        count += 1
    return count
