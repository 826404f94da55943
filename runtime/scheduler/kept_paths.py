"""What of a scored trie goes into the radix tree: a stream goes on from one of its paths."""

from __future__ import annotations

import numpy as np

from ..memory.kv_memory import KVMemory
from .batch import IntArray
from .rows import Rows

WORTH_KEEPING = 16
"""Tokens. What a shorter path has beyond the prompt is computed again, should it be read."""
MOST_KEPT = 32
"""Paths of one trie: each is a walk through the radix tree."""


def keep_long_paths(memory: KVMemory, rows: Rows, row: int, private: IntArray) -> IntArray:
    """Share the long paths of a row's trie, if all of it has been computed and its prompt is the
    tree's. Returns those of the ``private`` slots that nobody took; the request's hold stays where
    it was, at the end of its prompt."""
    request = rows.requests[row]
    assert request is not None
    assert request.trie is not None
    assert request.node is not None
    trie, prompt = request.trie, request.prompt_len
    long = np.flatnonzero(trie.tips & (trie.depths + 1 >= WORTH_KEEPING))[:MOST_KEPT]
    done = memory.caching and rows.computed[row] == rows.target[row]
    if not len(long) or not done or not prompt:
        return private
    tokens, slots = rows.tokens[row], rows.slots[row].copy()
    taken = np.zeros(len(trie.nodes), np.bool_)
    at = request.node
    memory.tree.lock(at)  # a second hold, which goes from path to path
    for tip in long.tolist():
        path = trie.path(tip)
        places = np.concatenate((np.arange(prompt), prompt + path))
        known = prompt + int(taken[path].sum())
        match = memory.share(
            at, tokens[places], slots[places], known, request.namespace, begins=False
        )
        slots[places] = match.slots
        taken[path] = True
        at = match.node
    memory.tree.unlock(at)
    return private[~taken]
