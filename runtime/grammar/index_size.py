"""How large an index would be, told from the automaton and the tokens before it is built."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from .automaton import DEAD, ByteAutomaton
from .vocabulary import Vocabulary

_LONGEST = 16
"""Bytes of a token that are looked at."""


def expected_ways(automaton: ByteAutomaton, vocabulary: Vocabulary) -> int:
    """About how many (state, token that may come) pairs there are.

    Tokens are taken for random: the first byte and the others as often as in the vocabulary, as
    many of each length. Within a factor of two where states are many.
    """
    first, later, lengths = _frequencies(vocabulary)
    classes = np.frombuffer(automaton.classes, np.uint8)
    width = automaton.table.shape[1]
    begin = np.bincount(classes, first, width)
    go_on = np.bincount(classes, later, width)
    # The row for DEAD, the last one, stays zero.
    table = np.where(automaton.table == DEAD, automaton.states, automaton.table)
    survive = np.ones(automaton.states + 1)
    survive[-1] = 0.0
    ways = 0.0
    for count in lengths[1:]:
        ways += count * float((survive[table] @ begin).sum())
        survive[:-1] = survive[table] @ go_on
    return int(ways)


@lru_cache(maxsize=4)
def _frequencies(vocabulary: Vocabulary) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Shares of the bytes as first and as later ones, and how many tokens have each length."""
    tokens = [data for data in vocabulary.tokens if data]
    first = np.bincount([data[0] for data in tokens], minlength=256)
    every = np.bincount(np.frombuffer(b"".join(tokens), np.uint8), minlength=256)
    lengths = np.bincount([min(len(data), _LONGEST) for data in tokens], minlength=_LONGEST + 1)
    later = every - first
    return first / max(first.sum(), 1), later / max(later.sum(), 1), lengths
