"""Which states of an automaton no short text tells apart.

A token is a short text: a state a thousand characters before the end of `[a-z]{1,2000}` lets the
same tokens come as the one behind it. So rows are few where states are many.
"""

from __future__ import annotations

import numpy as np

from .automaton import ByteAutomaton


def alike(automaton: ByteAutomaton, length: int) -> np.ndarray:
    """[states] int32: equal for states in which the same texts of up to ``length`` bytes may come,
    whatever may end there.

    Moore's refinement of a partition (Gedanken-experiments on sequential machines, 1956), ended
    after ``length`` rounds: after k of them a block holds what k bytes do not tell apart.
    """
    blocks = np.zeros(automaton.states + 1, np.int32)
    blocks[-1] = -1  # DEAD's
    count = 1
    draw = np.random.default_rng(0).integers(1, 1 << 63, automaton.table.shape[1], np.uint64) | 1
    for _ in range(length):
        behind = blocks[automaton.table]
        firsts, names = _numbered(behind, draw)
        if len(firsts) == count:
            break
        count = len(firsts)
        blocks[:-1] = names
    return blocks[:-1]


def _numbered(lines: np.ndarray, draw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(where each different line of ``lines`` [n, w] comes first, [n] which of them each is). Lines
    are told apart by a hash, ten times as fast, as long as that errs for none of them."""
    hashes = (lines.astype(np.uint64) * draw).sum(axis=1, dtype=np.uint64)
    _, firsts, names = np.unique(hashes, return_index=True, return_inverse=True)
    if (lines == lines[firsts[names]]).all():
        return firsts, names
    _, firsts, names = np.unique(lines, axis=0, return_index=True, return_inverse=True)
    return firsts, names.reshape(-1)
