"""A vocabulary's tokens as a tree of their bytes, level by level: many states of an automaton take
all tokens at once, and what tokens share is walked once."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from .automaton import DEAD, ByteAutomaton
from .vocabulary import Vocabulary

_AT_ONCE = 64
"""States that take all tokens at once, in some tens of megabytes."""


class _Level(NamedTuple):
    """Nodes at one depth. ``parents``: [n] int32, nodes of the level before. ``bytes``: [n] uint8,
    how they are reached. ``ends``, ``ids``: [m] int32, the nodes where tokens end, and the tokens;
    several may end at one."""

    parents: np.ndarray
    bytes: np.ndarray
    ends: np.ndarray
    ids: np.ndarray


class TokenLevels:
    """Immutable. Takes up to a tenth of a second to make; `levels_of` makes it once."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._words = vocabulary.words
        self._levels: list[_Level] = []
        ids = np.array([i for i, data in enumerate(vocabulary.tokens) if data], np.int32)
        lengths = np.array([len(vocabulary.tokens[i]) for i in ids], np.int64)
        data = np.frombuffer(b"".join(vocabulary.tokens), np.uint8)
        begins = np.cumsum(lengths) - lengths
        self._first = data[begins]
        node = np.zeros(len(ids), np.int64)
        """Of each token that goes on, where it is."""
        for depth in range(int(lengths.max(initial=0))):
            ways, at = np.unique(node << 8 | data[begins + depth], return_inverse=True)
            done = lengths == depth + 1
            level = _Level(
                (ways >> 8).astype(np.int32),
                (ways & 255).astype(np.uint8),
                at[done].astype(np.int32),
                ids[done],
            )
            self._levels.append(level)
            ids, lengths, begins, node = ids[~done], lengths[~done], begins[~done], at[~done]

    def horizon(self, automaton: ByteAutomaton) -> int:
        """Bytes of the longest token that may come in some state."""
        lives = (automaton.table != DEAD).any(axis=0)  # of each class of bytes
        classes = np.frombuffer(automaton.classes, np.uint8)
        usable = np.ones(1, np.bool_)
        for depth, level in enumerate(self._levels):
            usable = usable[level.parents] & lives[classes[level.bytes]]
            if not usable.any():
                return depth
        return len(self._levels)

    def begun(self, automaton: ByteAutomaton) -> np.ndarray:
        """[states] how many tokens begin with a byte that may come: no fewer than may come."""
        tokens = np.bincount(self._first, minlength=256)
        classes = np.frombuffer(automaton.classes, np.uint8)
        each = np.bincount(classes, tokens, automaton.table.shape[1])
        return (automaton.table != DEAD) @ each

    def rows(self, automaton: ByteAutomaton, states: np.ndarray) -> np.ndarray:
        """[S, words] int32: for each of ``states`` [S] the packed ids of the tokens that may come,
        without ends."""
        packed = [
            self._some(automaton, states[i : i + _AT_ONCE]) for i in range(0, len(states), _AT_ONCE)
        ]
        return np.concatenate(packed) if packed else np.zeros((0, self._words), np.int32)

    def _some(self, automaton: ByteAutomaton, states: np.ndarray) -> np.ndarray:
        classes = np.frombuffer(automaton.classes, np.uint8)
        table = automaton.padded
        bits = np.zeros((len(states), self._words * 32), np.bool_)
        here = states[None, :].astype(np.int32)
        places = np.zeros(1, np.int32)
        """Of each node of the level, which of ``here`` it is; -1 where no state gets to it."""
        for level in self._levels:
            nodes = np.flatnonzero(places[level.parents] >= 0)
            parents = places[level.parents[nodes]]
            after = table[here[parents], classes[level.bytes[nodes]][:, None]]
            some = (after != DEAD).any(axis=1)
            here = after[some]
            if not len(here):
                break
            places = np.full(len(level.parents), -1, np.int32)
            places[nodes[some]] = np.arange(len(here), dtype=np.int32)
            at = places[level.ends]
            kept = at >= 0
            bits[:, level.ids[kept]] = (here[at[kept]] != DEAD).T
        return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


_known: WeakKeyDictionary[Vocabulary, TokenLevels] = WeakKeyDictionary()


def levels_of(vocabulary: Vocabulary) -> TokenLevels:
    """A vocabulary's, made once."""
    found = _known.get(vocabulary)
    if found is None:
        found = _known[vocabulary] = TokenLevels(vocabulary)
    return found
