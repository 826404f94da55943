"""Names of blocks: what a run of tokens is called where its KV is kept outside the device.

A block is `BLOCK` tokens. Its name says all tokens before it too, so that a name found means that
the KV fits:

    tokens       [ 0 ……… 15 ][ 16 ……… 31 ][ 32 … 40
    names    namespace → k0 ────→ k1          (the rest has none)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from .page_pool import SlotArray
from .radix_node import Node, TokenArray

BLOCK = 16
KEY_BYTES = 32
_STEP = 4 * BLOCK


class BlockNames:
    """Names are keyed: without ``secret`` nobody can try whether some text has one."""

    def __init__(self, secret: bytes) -> None:
        self._keyed = hashlib.blake2b(key=secret, digest_size=KEY_BYTES, person=b"ramet-kv-block")

    def follow(self, parent: bytes, tokens: TokenArray) -> Iterator[bytes]:
        """Names of the whole blocks of ``tokens`` behind the one named ``parent``, or behind
        nothing in the namespace ``parent``."""
        data = np.ascontiguousarray(tokens, "<i4").tobytes()
        for at in range(0, len(tokens) - BLOCK + 1, BLOCK):
            named = self._keyed.copy()
            named.update(len(parent).to_bytes(4, "little") + parent + data[4 * at : 4 * at + _STEP])
            parent = named.digest()
            yield parent

    def extend(
        self, names: list[bytes], tokens: TokenArray, namespace: bytes, count: int
    ) -> Sequence[bytes]:
        """Make ``names``, of the first blocks of ``tokens``, the first ``count`` names at least."""
        while len(names) < count:
            at = len(names) * BLOCK
            parent = names[-1] if names else namespace
            names += self.follow(parent, tokens[at : at + BLOCK])
        return names

    def leaving(self, node: Node, left: int) -> tuple[list[bytes], npt.NDArray[np.int32]]:
        """Blocks that end in the tokens of ``node`` from ``left`` on: their names, and their slots
        [n, BLOCK]."""
        assert node.parent is not None
        start, name = self._chain(node.parent)
        tokens, slots = _with_head(node, start % BLOCK)
        first = start - start % BLOCK
        stay = (start + left - first) // BLOCK  # blocks that end in what stays
        names = list(self.follow(name, tokens))[stay:]
        begin = stay * BLOCK
        return names, slots[begin : begin + len(names) * BLOCK].reshape(-1, BLOCK)

    def _chain(self, node: Node) -> tuple[int, bytes]:
        """How long the path to the end of ``node`` is, and the name of its last whole block."""
        unnamed: list[Node] = []
        at = node
        while at.chain is None:
            unnamed.append(at)
            assert at.parent is not None, "a root has a chain"
            at = at.parent
        chain = at.chain
        for below in reversed(unnamed):
            start, name = chain
            tokens, _ = _with_head(below, start % BLOCK)
            for later in self.follow(name, tokens):
                name = later
            chain = below.chain = start + len(below.tokens), name
        return chain


def _with_head(node: Node, count: int) -> tuple[TokenArray, SlotArray]:
    """The tokens and slots of ``node``, and of the path before it the last ``count``."""
    tokens, slots = [node.tokens], [node.slots]
    at = node.parent
    while count:
        assert at is not None
        tokens.append(at.tokens[-count:])
        slots.append(at.slots[-count:])
        count -= len(tokens[-1])
        at = at.parent
    if len(tokens) == 1:
        return node.tokens, node.slots
    return np.concatenate(tokens[::-1]), np.concatenate(slots[::-1])
