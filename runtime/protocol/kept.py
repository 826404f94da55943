"""Which tokens of an output stay in its stream: gateway and engine must agree on it."""

from __future__ import annotations

from collections.abc import Sequence


def kept(
    tokens: Sequence[int],
    by_token: bool,
    text_bytes: int,
    table: Sequence[bytes],
    prefix: bytes = b"",
) -> tuple[int, bytes]:
    """How many tokens stay, and the bytes before the stop string that were in a dropped one. All of
    ``prefix``, which the output begins with, is in the one or the other.

    ``by_token``: the last token ended the output; ``text_bytes``: bytes before a stop string, -1
    where none did, those of ``prefix`` left out; ``table``: the bytes of each token. Tokens go from
    the first that overlaps the stop string; further back to where a character begins, so that what
    is carried over is whole characters.
    """
    if by_token:
        tokens = tokens[:-1]
    if text_bytes < 0 and not prefix:
        return len(tokens), b""
    data = b"".join(table[token] for token in tokens)
    size = len(prefix) + max(text_bytes, 0)
    if text_bytes < 0:
        if len(data) >= size:
            return len(tokens), b""
        data = prefix  # it ended inside
    ends: list[int] = []
    total = 0
    for token in tokens:
        total += len(table[token])
        if total > size:
            break
        ends.append(total)
    count = len(ends)
    while count and _inside_character(data, ends[count - 1]):
        count -= 1
    start = ends[count - 1] if count else 0
    return count, data[start:size]


def _inside_character(data: bytes, position: int) -> bool:
    return position < len(data) and data[position] & 0xC0 == 0x80
