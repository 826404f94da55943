"""The tokens a grammar chooses from: their bytes, and how text becomes them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ..protocol.errors import GrammarError
from .matcher import MaskRow

if TYPE_CHECKING:
    from ..gateway.tokenizer import Tokenizer

Encoder = Callable[[str], Sequence[int]]
"""Ids of a text that goes on from other text, no special tokens parsed or added."""


class Vocabulary:
    """Token bytes by id and the ids that end an answer. Immutable; safe between threads.

    ``tokens``: [n] bytes of every id, b"" where the id stands for no text (special, unused): such
    ids are never generated but as an end. ``size``: width of the logits, >= n; ids past n are never
    allowed. ``eos_ids``: ids that end an answer. ``encoder``: the model's own tokenizer; without it
    the longest token at each place is taken.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        *,
        size: int | None = None,
        eos_ids: Sequence[int] = (),
        encoder: Encoder | None = None,
    ) -> None:
        width = len(tokens) if size is None else size
        ends = tuple(dict.fromkeys(i for i in eos_ids if 0 <= i < width))
        table = list(tokens[:width])
        table += [b""] * (width - len(table))
        for end in ends:  # an id that ends an answer is no part of its text
            table[end] = b""
        self.tokens = table
        self.size = width
        self.eos_ids = ends
        self._encoder = encoder

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, size: int | None = None) -> Vocabulary:
        """Of a model's tokenizer; ``size`` is the width of its logits where that is another."""
        after = next((i for i, data in enumerate(tokenizer.bytes_table) if data), None)
        return cls(
            tokenizer.bytes_table,
            size=size or tokenizer.vocab_size,
            eos_ids=tokenizer.eos_ids,
            encoder=lambda text: tokenizer.encode_segments([(text, False)], after=after),
        )

    @property
    def words(self) -> int:
        """int32 words of one packed mask row: ceil(size / 32)."""
        return (self.size + 31) // 32

    @cached_property
    def ends_row(self) -> MaskRow:
        """The mask row of nothing but the ids that end an answer. Not to be changed."""
        bits = np.zeros(self.words * 32, np.bool_)
        bits[list(self.eos_ids)] = True
        row = np.packbits(bits, bitorder="little").view(np.int32)
        row.flags.writeable = False
        return row

    @cached_property
    def fingerprint(self) -> str:
        """64 hex digits: equal for vocabularies that mask alike."""
        digest = hashlib.sha256(repr((self.size, self.eos_ids)).encode())
        for data in self.tokens:
            digest.update(len(data).to_bytes(4, "little") + data)
        return digest.hexdigest()

    def encode(self, data: bytes) -> list[int]:
        """The model's own tokens for ``data``, which join to exactly these bytes.

        What is no UTF-8, and text that the tokenizer would change (normalize), is cut greedily.
        Raises `GrammarError` where no tokens join to it: some models lack single bytes.
        """
        start, end = _utf8_span(data)
        ids: list[int] = []
        if start:
            ids += self._greedy(data[:start])
        if start < end:
            ids += self._canonical(data[start:end])
        if end < len(data):
            ids += self._greedy(data[end:])
        return ids

    def _canonical(self, data: bytes) -> list[int]:
        if self._encoder is not None:
            ids = list(self._encoder(data.decode()))
            known = all(0 <= i < self.size for i in ids)
            if known and b"".join([self.tokens[i] for i in ids]) == data:
                return ids
        return self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(data):
            for length in range(min(self.longest, len(data) - at), 0, -1):
                token = self.ids_of_bytes.get(data[at : at + length])
                if token is not None:
                    ids.append(token)
                    at += length
                    break
            else:
                raise GrammarError(f"no token of the vocabulary begins with byte {data[at]:#04x}")
        return ids

    @cached_property
    def ids_of_bytes(self) -> dict[bytes, int]:
        """The (first) id of every token's bytes."""
        table: dict[bytes, int] = {}
        for i, data in enumerate(self.tokens):
            if data:
                table.setdefault(data, i)
        return table

    @cached_property
    def sorted_tokens(self) -> list[bytes]:
        """The bytes of all tokens, each once, in order: those with one prefix stand together."""
        return sorted(self.ids_of_bytes)

    @cached_property
    def missing_bytes(self) -> frozenset[int]:
        """Bytes that are in no token: no text that holds one can be generated."""
        return frozenset(range(256)) - set().union(*self.ids_of_bytes)

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest token."""
        return max(map(len, self.ids_of_bytes), default=0)


def _utf8_span(data: bytes) -> tuple[int, int]:
    """Where whole characters begin and end; (0, 0) if they do not make one run."""
    start = 0
    while start < min(3, len(data)) and data[start] & 0xC0 == 0x80:
        start += 1
    try:
        data[start:].decode()
    except UnicodeDecodeError as error:
        end = start + error.start
        return (start, end) if end > start and len(data) - end <= 3 else (0, 0)
    return start, len(data)
