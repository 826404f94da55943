"""The continuations that a request has scored: a tree of tokens, each computed once.

Only inner nodes are computed. They take the places in the request's row that follow the prompt,
depth first, so that a node's descendants are the nodes of an interval that begins with it::

    choices   Paris   Pa-ris   Pa-ris-h   Pa-go   Lon-don      (hyphens are between tokens)
    row       prompt ... | Lon  Pa  ris
    ends                    1    3    3       Pa sees the prompt, ris that and Pa
    targets   after the prompt: Lon Pa Paris, after Lon: don, after Pa: go ris, after ris: h
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..protocol.errors import BadInputError
from ..protocol.trie import MAX_NODES, Trie
from .batch import IntArray, LongArray, TrieChunk


@dataclass(slots=True)
class TokenTrie:
    """N nodes, I of which have children."""

    nodes: IntArray
    """[I] tokens of inner nodes, depth first"""
    parents: IntArray
    """[I] which inner node each follows, -1: the prompt"""
    depths: IntArray
    """[I] how many nodes come before it on its path"""
    ends: IntArray
    """[I] it and its descendants are inner nodes [j, ends[j])"""
    targets: IntArray
    """[N] tokens of all nodes, by parent: those after the prompt, after inner node 0, 1, ..."""
    cuts: IntArray
    """[I + 2] where in ``targets`` the children of the prompt begin, of inner node 0, 1, ..."""

    @property
    def tips(self) -> npt.NDArray[np.bool_]:
        """[I] whether only leaves follow it"""
        return self.ends == np.arange(1, len(self.nodes) + 1)

    @property
    def height(self) -> int:
        """Tokens of the longest path, its leaf included"""
        return int(self.depths.max(initial=-1)) + 2

    def chunk(self, item: int, prompt: int, start: int, end: int) -> tuple[TrieChunk, int] | None:
        """Of a request with a prompt of so many tokens, computing its tokens [start, end): who sees
        whom, and what is scored; with it the first of ``targets`` that is. ``None``: neither the
        prompt's end nor a node is among them."""
        # Of the prompt's end and the nodes, by number; an empty prompt has no end.
        first, last = max(start - prompt + 1, 0), end - prompt + 1
        if last <= first:
            return None
        spans = self.cuts[first : last + 1]
        scored = slice(int(spans[0]), int(spans[-1]))
        heads = np.arange(first, last, dtype=np.int32) + np.int32(prompt - 1 - start)
        chunk = TrieChunk(
            item=item,
            start=prompt,
            ends=self.ends[: end - prompt],
            depths=self.depths[: end - prompt],
            heads=heads,
            of=np.repeat(np.arange(last - first, dtype=np.int32), np.diff(spans)),
            targets=self.targets[scored],
        )
        return chunk, scored.start

    def path(self, node: int) -> LongArray:
        """The inner nodes from the prompt to this one."""
        path = [node]
        while (parent := int(self.parents[path[-1]])) >= 0:
            path.append(parent)
        return np.array(path[::-1], np.int64)


def trie_of(message: Trie, vocab_size: int) -> TokenTrie:
    """Raises `BadInputError` for what is no tree of tokens, or is too large."""
    tokens, parents = _column(message.tokens, "tokens"), _column(message.parents, "parents")
    count = len(tokens)
    if len(parents) != count:
        raise _bad(f"{len(parents)} parents for {count} tokens")
    if not 0 < count <= MAX_NODES:
        raise _bad(f"{count} nodes; there may be 1 to {MAX_NODES}")
    if not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise _bad(f"token ids must be in [0, {vocab_size})")
    depths, ends = _walk(parents.tolist())
    inner = np.unique(parents[parents >= 0])
    number = np.searchsorted(inner, parents).astype(np.int32)  # of each node's parent
    number[parents < 0] = -1
    cuts = np.zeros(len(inner) + 2, np.int32)
    np.cumsum(np.bincount(number + 1, minlength=len(inner) + 1), out=cuts[1:])
    return TokenTrie(
        nodes=tokens[inner],
        parents=number[inner],
        depths=np.array(depths, np.int32)[inner],
        ends=np.searchsorted(inner, np.array(ends)[inner]).astype(np.int32),
        targets=tokens[np.argsort(parents, kind="stable")],
        cuts=cuts,
    )


def _walk(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """(depth, end of its subtree) of each node."""
    depths, ends = [0] * len(parents), [len(parents)] * len(parents)
    path: list[int] = []
    for node, parent in enumerate(parents):
        while path and path[-1] != parent:
            ends[path.pop()] = node
        if parent != -1 and not path:
            raise _bad(
                f"the parent of node {node} is {parent}, not the node before or its ancestor"
            )
        depths[node] = len(path)
        path.append(node)
    return depths, ends


def _column(data: bytes, name: str) -> IntArray:
    if len(data) % 4:
        raise _bad(f"{name}: {len(data)} bytes are not whole int32")
    return np.frombuffer(data, "<i4").astype(np.int32)


def _bad(what: str) -> BadInputError:
    return BadInputError(f"trie: {what}", param="trie")
