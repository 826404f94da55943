"""A grammar and its matchers on llguidance, whose errors are silent unless asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..protocol.errors import GrammarError
from .matcher import MaskRow
from .vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MESSAGE = 240


class LLGuidanceGrammar:
    """Holds a matcher at the start, which every request copies."""

    kind = "llguidance"

    def __init__(self, start: LLMatcher, vocabulary: Vocabulary, nbytes: int) -> None:
        self._start = start
        self._vocabulary = vocabulary
        self.nbytes = nbytes

    def matcher(self) -> LLGuidanceMatcher:
        """A fresh matcher. Raises `GrammarError`."""
        return LLGuidanceMatcher(self._start.deep_copy(), self._vocabulary)


class LLGuidanceMatcher:
    """llguidance's matcher, with ends counted here and its error state asked for after every call:
    in that state it would allow nothing but an end, and a broken output would look whole."""

    def __init__(self, inner: LLMatcher, vocabulary: Vocabulary) -> None:
        self._inner = inner
        self._vocabulary = vocabulary
        self._ends = vocabulary.eos_ids
        self._taken = 0
        self._ended = False

    def fill(self, row: MaskRow) -> None:
        words = self._vocabulary.words
        if row.shape != (words,) or row.dtype != "int32" or not row.flags.c_contiguous:
            raise ValueError(f"a mask row is {words} contiguous int32, not {row.dtype} {row.shape}")
        if self._ended:
            self._fill_ends(row)
            return
        if self._ends:
            self._inner.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            check(self._inner)
            return
        self._fill_endless(row)

    def _fill_ends(self, row: MaskRow) -> None:
        row[:] = 0
        for end in self._ends:
            row[end >> 5] |= (1 << (end & 31)) - ((end & 31) == 31) * 2**32
        if not self._ends:
            raise GrammarError("the output is whole, and the vocabulary has no id to end it with")

    def _fill_endless(self, row: MaskRow) -> None:
        """The tokenizer given to the library ends with a made-up end, cut off here."""
        import numpy as np

        full = np.frombuffer(bytearray(self._inner.compute_bitmask()), np.int32)
        check(self._inner)
        row[:] = full[: len(row)]
        if self._vocabulary.size & 31:
            row[-1] &= np.int32((1 << (self._vocabulary.size & 31)) - 1)
        if not row.any():
            raise GrammarError("no token may follow, and the vocabulary has no id to end with")

    def accept(self, token: int) -> bool:
        if self._ended:
            return False
        if token in self._ends:
            self._ended = self.can_end()
            self._taken += self._ended
            return self._ended
        if not 0 <= token < self._vocabulary.size or not self._vocabulary.tokens[token]:
            return False
        taken = self._inner.try_consume_tokens([token])
        check(self._inner)
        self._taken += taken
        return taken == 1

    def rollback(self, n: int) -> None:
        if not 0 <= n <= self._taken:
            raise ValueError(f"cannot undo {n} of {self._taken} tokens")
        back = n - (self._ended and n > 0)
        if back and not self._inner.rollback(back):
            check(self._inner)
        self._taken -= n
        self._ended = self._ended and n == 0

    def can_end(self) -> bool:
        return self._ended or self._inner.is_accepting()

    def is_done(self) -> bool:
        if self._ended:
            return True
        if not self._inner.is_stopped():
            return False
        check(self._inner)
        return self._inner.is_accepting()

    def forced_tokens(self, recent: Sequence[int]) -> list[int]:  # noqa: ARG002
        if self._ended or self._inner.is_stopped():
            return []
        tokens = self._inner.compute_ff_tokens()
        check(self._inner)
        for i, token in enumerate(tokens):
            if token >= self._vocabulary.size or token in self._ends:
                return tokens[:i]
        return tokens

    def fork(self) -> LLGuidanceMatcher:
        twin = LLGuidanceMatcher(self._inner.deep_copy(), self._vocabulary)
        twin._taken = self._taken
        twin._ended = self._ended
        return twin


def check(inner: LLMatcher) -> None:
    """Raise `GrammarError` where the library is in its error state, which it never leaves."""
    if inner.is_error():
        raise GrammarError(*explain(inner.get_error()))


def explain(error: str) -> tuple[str]:
    """The library's error in one bounded line, with nothing of the spec that it may quote."""
    line = " ".join(error.split("<state>")[0].split("<grammar>")[0].split())
    if not line or line.startswith("NoExtensionBias"):
        line = "no output can match it, or none that this vocabulary can write"
    return (line if len(line) <= _MESSAGE else line[: _MESSAGE - 1] + "…",)
