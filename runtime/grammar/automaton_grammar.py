"""A grammar on an automaton over bytes: states that no token tells apart share a row."""

from __future__ import annotations

from array import array

import msgspec
import numpy as np

from .automaton import DEAD, ByteAutomaton
from .state_matcher import State, StateGrammar
from .token_levels import TokenLevels
from .vocabulary import Vocabulary


class PackedRows(msgspec.Struct, frozen=True, array_like=True):
    """``names``: int32 [states], equal for states of one row. Those under the number of ``rows``
    [R, words] int32 are where that row is; others have yet to be made. Ends are in no row."""

    automaton: bytes
    names: bytes
    rows: bytes


class AutomatonGrammar(StateGrammar):
    """Its states are the automaton's, and so are the places in it."""

    kind = "automaton"

    def __init__(self, levels: TokenLevels, vocabulary: Vocabulary, form: PackedRows) -> None:
        super().__init__(ByteAutomaton.unpack(form.automaton), vocabulary, 0)
        self._levels = levels
        names = np.frombuffer(form.names, np.int32)
        self._names = array("i", (names << 1 | self.automaton.finals).tobytes())
        """Where the text may end, another than where it may not."""
        self._rows = np.frombuffer(form.rows, np.int32).reshape(-1, vocabulary.words)
        self.check_start()

    @property
    def nbytes(self) -> int:
        """With the rows it has come to hold."""
        rows = len(self._rows) + len(self._states)
        return self.fixed_bytes + 4 * len(self._names) + rows * self.vocabulary.words * 4

    def follow(self, state: int, place: int, token: int) -> tuple[int, int] | None:
        """See `StateGrammar.follow`."""
        del state
        data = self.vocabulary.tokens[token]
        after = self.automaton.walk(place, data) if data else DEAD
        return None if after == DEAD else (after, after)

    def _key(self, number: int) -> int:
        return self._names[number]

    def _make(self, number: int) -> State:
        name, final = divmod(self._names[number], 2)
        if name < len(self._rows):
            row = self._rows[name]
        else:
            row = self._levels.rows(self.automaton, np.array([number]))[0]
        dead = not row.any()
        return State(row | self.vocabulary.ends_row if final else row, bool(final), dead)
