"""Continuations of one prompt, as a tree of tokens."""

from __future__ import annotations

import msgspec

MAX_NODES = 1 << 16
"""Of one message."""


class Trie(msgspec.Struct, frozen=True, kw_only=True):
    """Node i is the token ``tokens[i]`` after the path that ends with node ``parents[i]``, or after
    the prompt where that is -1. Both are int32 as bytes. Nodes come depth first: a parent is the
    node before, or one of that node's ancestors."""

    tokens: bytes
    parents: bytes
