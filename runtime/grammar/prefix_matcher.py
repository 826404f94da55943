"""Outputs that begin with given bytes and then go on freely: what a healed prompt asks for.

A token may come where the bytes that are still missing begin with it, or it begins with them. That
is a range of the sorted vocabulary and a look-up for each shorter length, so nothing is compiled.
(Where the output must also match something, the bytes go before it in one grammar instead: which
tokens may span the border depends on the grammar then, and its library knows that at once.)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..protocol.errors import GrammarError
from .forced import after_all
from .matcher import MaskRow
from .vocabulary import Vocabulary


class PrefixGrammar:
    """The vocabulary in order of its bytes, shared by all matchers. Immutable."""

    kind = "prefix"

    def __init__(self, vocabulary: Vocabulary) -> None:
        known = [i for i, data in enumerate(vocabulary.tokens) if data]
        known.sort(key=vocabulary.tokens.__getitem__)
        self.vocabulary = vocabulary
        self._ids = np.array(known, np.int32)
        self._sorted = [vocabulary.tokens[i] for i in known]

    @property
    def nbytes(self) -> int:
        return self._ids.nbytes + 8 * len(self._sorted)

    def matcher(self, prefix: bytes) -> PrefixMatcher:
        """A matcher before the first of these bytes. Raises `GrammarError` where no tokens join to
        them."""
        return PrefixMatcher(self, prefix)

    def equal(self, data: bytes) -> npt.NDArray[np.int32]:
        """[n] ids of the tokens of exactly these bytes."""
        first = bisect_left(self._sorted, data)
        return self._ids[first : bisect_right(self._sorted, data, lo=first)]

    def beginning(self, prefix: bytes) -> npt.NDArray[np.int32]:
        """[n] ids of the tokens that begin with these bytes, those of just them included."""
        first = bisect_left(self._sorted, prefix)
        end = after_all(prefix)
        last = bisect_left(self._sorted, end, lo=first) if end else len(self._sorted)
        return self._ids[first:last]

    def writable(self, prefix: bytes) -> list[bool]:
        """[len + 1]: whether tokens can go on from each place of it through its end. Some
        vocabularies lack single bytes, and a token may lead to where only they would do."""
        longest = self.vocabulary.longest
        known = self.vocabulary.ids_of_bytes
        found = [False] * len(prefix) + [True]
        for place in range(len(prefix) - 1, -1, -1):
            ends = range(place + 1, min(place + longest, len(prefix)) + 1)
            found[place] = any(found[end] and prefix[place:end] in known for end in ends) or bool(
                len(self.beginning(prefix[place:]))
            )
        return found


class PrefixMatcher:
    """How much of the prefix an output has. Past its end anything may come, ends included."""

    def __init__(self, grammar: PrefixGrammar, prefix: bytes) -> None:
        self._grammar = grammar
        self._prefix = prefix
        self._writable = grammar.writable(prefix)
        if not self._writable[0]:
            raise GrammarError("the vocabulary has no tokens for the bytes to begin with")
        self._places = [0]
        """Bytes of the prefix that are there after each token."""

    @property
    def rest(self) -> bytes:
        """Bytes that must come before anything may."""
        return self._prefix[self._places[-1] :]

    def fill(self, row: MaskRow) -> None:
        """Write which ids may come next."""
        place, rest = self._places[-1], self.rest
        grammar = self._grammar
        if not rest:
            row.fill(-1)
            return
        bits = np.zeros(len(row) * 32, np.bool_)
        bits[grammar.beginning(rest)] = True
        for length in range(1, min(len(rest) - 1, grammar.vocabulary.longest) + 1):
            if self._writable[place + length]:
                bits[grammar.equal(rest[:length])] = True
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token: int) -> bool:
        """False, and nothing changed, for a token that does not go on with the prefix."""
        tokens = self._grammar.vocabulary.tokens
        data = tokens[token] if 0 <= token < len(tokens) else b""
        place, rest = self._places[-1], self.rest
        if rest:
            after = place + len(data)
            goes_on = data.startswith(rest) or (rest.startswith(data) and self._writable[after])
            if not data or not goes_on:
                return False
        self._places.append(min(place + len(data), len(self._prefix)))
        return True

    def rollback(self, n: int) -> None:
        if not 0 <= n < len(self._places):
            raise ValueError(f"cannot undo {n} of {len(self._places) - 1} tokens")
        if n:
            del self._places[-n:]

    def can_end(self) -> bool:
        return not self.rest

    def is_done(self) -> bool:
        """Something may always follow."""
        return False

    def forced_tokens(self, recent: Sequence[int]) -> list[int]:  # noqa: ARG002
        """None: how the bytes are cut is for the model to say."""
        return []

    def fork(self) -> PrefixMatcher:
        twin = PrefixMatcher.__new__(PrefixMatcher)
        twin.__dict__.update(self.__dict__)
        twin._places = self._places.copy()
        return twin
