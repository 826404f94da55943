"""A grammar on outlines-core's index: its states are the index's."""

from __future__ import annotations

import msgspec
import numpy as np
import outlines_core

from .automaton import DEAD, ByteAutomaton
from .matcher import MaskRow
from .state_matcher import State, StateGrammar
from .vocabulary import Vocabulary


class PackedIndex(msgspec.Struct, frozen=True, array_like=True):
    """``start``: state of the index behind the marker. ``rows``: state → packed row of the states
    in which so many tokens may come that their row takes long to make."""

    index: bytes
    automaton: bytes
    start: int
    rows: dict[int, bytes]


class OutlinesGrammar(StateGrammar):
    """An index with its rows."""

    kind = "outlines"

    def __init__(
        self, index: outlines_core.Index, vocabulary: Vocabulary, form: PackedIndex
    ) -> None:
        super().__init__(ByteAutomaton.unpack(form.automaton), vocabulary, form.start)
        self.index = index
        self._made = form.rows
        self._given_bytes = len(form.index) * 3 + sum(map(len, form.rows.values()))
        self.check_start()

    @property
    def nbytes(self) -> int:
        """With room for the rows it may come to hold."""
        rows = min(self.automaton.states, self._kept) * self.vocabulary.words * 4
        return self._given_bytes + self.fixed_bytes + rows

    def follow(self, state: int, place: int, token: int) -> tuple[int, int] | None:
        """See `StateGrammar.follow`."""
        after = self.index.get_next_state(state, token)
        if after is None:
            return None
        if place != DEAD:
            place = self.automaton.walk(place, self.vocabulary.tokens[token])
        return after, place

    def _key(self, number: int) -> int:
        return number

    def _make(self, number: int) -> State:
        final = self.index.is_final_state(number)
        made = self._made.get(number)
        if made is not None:
            return State(np.frombuffer(made, np.int32), final, False)
        ids = allowed_ids(self.index, number, self.vocabulary)
        return State(packed_row(ids, final, self.vocabulary), final, ids.size == 0)


def allowed_ids(index: outlines_core.Index, state: int, vocabulary: Vocabulary) -> np.ndarray:
    """[n] int64 ids of the tokens that may come in a state, without ends."""
    ids = np.array(index.get_allowed_tokens(state) or (), np.int64)
    return ids[ids < vocabulary.size]


def packed_row(ids: np.ndarray, final: bool, vocabulary: Vocabulary) -> MaskRow:
    """The packed row of a state in which ``ids`` may come; ends too if it is ``final``."""
    bits = np.zeros(vocabulary.words * 32, np.bool_)
    bits[ids] = True
    row = np.packbits(bits, bitorder="little").view(np.int32)
    row |= vocabulary.ends_row if final else 0
    row.flags.writeable = False
    return row
