r"""Classes of characters that Python has no table of: scripts and other properties of Unicode.

outlines-core knows them. Its automaton of one character, followed byte by byte, tells which
characters those are.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from typing import Any

from .charset import Ranges, ranges_of

_NAME = re.compile(r"[A-Za-z0-9_]{1,40}([=:][A-Za-z0-9_]{1,40})?")
_MARKER, _END = ord("\n"), 256


@lru_cache(maxsize=64)
def library_class(name: str) -> Ranges | None:
    r"""The set behind ``\p{name}``: ``Greek``, ``Script=Han``, ``Emoji``, ``Alphabetic``; None for
    a name that Unicode does not have. Takes some milliseconds, the first time for a name."""
    plain = name.replace(" ", "_").replace("-", "_")
    if not _NAME.fullmatch(plain):
        return None
    import outlines_core

    try:
        index = outlines_core.Index(f"\\n(?:\\p{{{plain}}})\\z", _bytes_vocabulary())
    except ValueError:
        return None
    start = index.get_next_state(index.get_initial_state(), _MARKER)
    pairs: list[tuple[int, int]] = []
    for first in range(256) if start is not None else ():
        state = index.get_next_state(start, first)
        if state is None:
            continue
        if first < 0x80:
            pairs.append((first, first))
        else:
            more = 1 if first < 0xE0 else 2 if first < 0xF0 else 3
            _collect(index, state, first & (0x3F >> more), more, pairs)
    return ranges_of(pairs)


def _collect(index: Any, state: int, point: int, more: int, pairs: list[tuple[int, int]]) -> None:
    """Add the characters that begin with the bits of ``point`` and have ``more`` bytes to come."""
    for byte in index.get_allowed_tokens(state) or ():
        if 0x80 <= byte < 0xC0:
            longer = point << 6 | (byte & 0x3F)
            if more == 1:
                pairs.append((longer, longer))
            else:
                _collect(index, index.get_next_state(state, byte), longer, more - 1, pairs)


@cache
def _bytes_vocabulary() -> Any:
    import outlines_core

    return outlines_core.Vocabulary(_END, {bytes((byte,)): [byte] for byte in range(256)})
