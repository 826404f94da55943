"""The bytes behind each token id: what joins to the UTF-8 of the text."""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer

from ..protocol.errors import ModelError

_SPACE = "\u2581"
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


def bytes_of_tokens(tokenizer: Tokenizer, size: int) -> list[bytes]:
    """[size] bytes of every id; empty for special tokens and for ids that mean nothing.

    Raises `ModelError` for a tokenizer whose tokens are not bytes in a known disguise.
    """
    model = type(tokenizer.model).__name__
    if model not in ("BPE", "Unigram"):
        raise ModelError(f"unknown tokenizer model {model}; known are BPE, Unigram")
    added = tokenizer.get_added_tokens_decoder()
    parts = _types(component(tokenizer.decoder)) | _types(component(tokenizer.pre_tokenizer))
    convert = _from_byte_level if "ByteLevel" in parts else _from_sentencepiece
    table = [b""] * size
    for token, number in tokenizer.get_vocab(with_added_tokens=True).items():
        if number < size and number not in added:
            table[number] = convert(token)
    for number, token in added.items():
        if number < size and not token.special:
            table[number] = token.content.encode()
    return table


def component(part: Any) -> dict[str, Any]:
    """A part of a tokenizer as its JSON; {} for one that is not set."""
    return {} if part is None else json.loads(part.__getstate__())


def _types(spec: dict[str, Any]) -> set[str]:
    """The names of a decoder or pre-tokenizer and of all that it is made of."""
    parts = [*spec.get("decoders", ()), *spec.get("pretokenizers", ())]
    return {str(spec.get("type"))}.union(*(_types(part) for part in parts))


def _byte_characters() -> dict[int, int]:
    """Byte-level BPE writes a byte as a printable character; this leads back: code point → byte.

    Printable bytes of Latin-1 stand for themselves, the others for 256, 257, … in order.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {byte: byte for byte in printable}
    table.update({256 + place: byte for place, byte in enumerate(others)})
    return table


BYTE_CHARACTERS = _byte_characters()
_LEGAL = frozenset(map(chr, BYTE_CHARACTERS))


def _from_byte_level(token: str) -> bytes:
    if not _LEGAL.issuperset(token):  # a token that was added without the disguise
        return token.encode()
    return token.translate(BYTE_CHARACTERS).encode("latin-1")


def _from_sentencepiece(token: str) -> bytes:
    match = _BYTE_PIECE.fullmatch(token) if token.startswith("<0x") else None
    if match:
        return bytes((int(match[1], 16),))
    return token.replace(_SPACE, " ").encode()
