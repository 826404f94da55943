"""Bytes that must come next, as the tokens the model itself would have used for them.

Forcing text is only harmless where the tokens are those that the model would have chosen: a token
that ends where the forced bytes end may not be, because a longer one that runs on could have taken
its place. So trailing tokens are held back from the first place on at which some token of the
vocabulary begins, runs through the end of the forced bytes and goes on in a way the grammar allows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from ..protocol.errors import GrammarError
from .vocabulary import Vocabulary

Continues = Callable[[bytes], bool]
"""Whether some bytes may follow the forced ones."""

_LAST_TOKENS = 4
"""Tokens at the end of which any byte may be where a longer token begins."""
_TRIED = 16
"""Longer tokens held against the grammar at one place; with more, one of them is taken to fit."""


def canonical_tokens(
    vocabulary: Vocabulary,
    forced: bytes,
    recent: Sequence[int] = (),
    continues: Continues | None = None,
) -> list[int]:
    """The tokens for ``forced`` that can be appended without changing what the model would say.

    ``recent``: the tokens generated before, of which the last give context; they are never cut
    anew. ``continues``: what the grammar lets follow; without it anything may. [] where nothing is
    safe, or the vocabulary has no tokens for the bytes.
    """
    whole = _whole_characters(forced, recent, vocabulary)
    if not whole:
        return []
    try:
        ids = _in_context(vocabulary, whole, recent)
    except GrammarError:
        return []
    ends: list[int] = []
    at = 0
    for token in ids:
        at += len(vocabulary.tokens[token])
        ends.append(at)
    keep = _stable(vocabulary, forced, ends, continues)
    return [token for token, end in zip(ids, ends) if end <= keep]


def context_of(vocabulary: Vocabulary, recent: Sequence[int]) -> tuple[int, ...]:
    """The recent tokens that have a say in what follows: the last, and as many before it as it
    takes to begin with a character (four at most)."""
    for count in range(1, min(len(recent), _LAST_TOKENS) + 1):
        first = vocabulary.tokens[recent[-count]][:1]
        if first and first[0] & 0xC0 != 0x80:
            return tuple(recent[-count:])
    return tuple(recent[-_LAST_TOKENS:])


def _stable(
    vocabulary: Vocabulary, forced: bytes, ends: Sequence[int], continues: Continues | None
) -> int:
    """The first place from which a token could run on past the last end; that end if none."""
    last = ends[-1]
    first = ends[-_LAST_TOKENS - 1] if len(ends) > _LAST_TOKENS else 0
    for place in range(max(first, len(forced) - vocabulary.longest), last):
        inside = any(
            forced[place:after] in vocabulary.ids_of_bytes
            for after in range(last + 1, len(forced) + 1)
        )
        if inside or runs_on(vocabulary.sorted_tokens, forced[place:], continues):
            return place
    return last


def runs_on(tokens: Sequence[bytes], prefix: bytes, continues: Continues | None = None) -> bool:
    """Whether a token longer than ``prefix`` begins with it and goes on as the grammar allows.
    ``tokens`` are sorted."""
    start = bisect_left(tokens, prefix + b"\0")
    if continues is None:
        return start < len(tokens) and tokens[start].startswith(prefix)
    size = len(prefix)
    while start < len(tokens) and tokens[start].startswith(prefix):
        # All tokens with the same next byte stand together: one test passes over them.
        group = tokens[start][: size + 1]
        end = bisect_left(tokens, after_all(group), lo=start) if after_all(group) else len(tokens)
        if continues(group[size:]):
            if end - start > _TRIED:
                return True
            if any(continues(token[size:]) for token in tokens[start:end]):
                return True
        start = end
    return False


def after_all(prefix: bytes) -> bytes:
    """The least bytes greater than all that begin with ``prefix``; b"" if there are none."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes((stripped[-1] + 1,)) if stripped else b""


def _in_context(vocabulary: Vocabulary, data: bytes, recent: Sequence[int]) -> list[int]:
    """Tokens of ``data`` as they would come after the recent ones, if those would stay the same."""
    before = list(context_of(vocabulary, recent))
    head = b"".join(vocabulary.tokens[token] for token in before)
    if head and head[0] & 0xC0 != 0x80:
        ids = vocabulary.encode(head + data)
        if ids[: len(before)] == before:
            return ids[len(before) :]
    return vocabulary.encode(data)


def _whole_characters(forced: bytes, recent: Sequence[int], vocabulary: Vocabulary) -> bytes:
    """``forced`` up to its last whole character; b"" where it begins inside of one that the
    recent tokens do not begin."""
    head = b"".join(vocabulary.tokens[token] for token in context_of(vocabulary, recent))
    head = head[max((i for i, byte in enumerate(head) if byte & 0xC0 != 0x80), default=len(head)) :]
    data = head + forced
    if not forced or data[0] & 0xC0 == 0x80:
        return b""
    lead = max(i for i, byte in enumerate(data) if byte & 0xC0 != 0x80)
    length = 1 if data[lead] < 0x80 else 2 if data[lead] < 0xE0 else 3 if data[lead] < 0xF0 else 4
    end = len(data) if lead + length == len(data) else lead
    return forced[: max(end - len(head), 0)]
