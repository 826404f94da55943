"""Names that are not there: what was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from ramet.runtime.protocol.sampling import ALIASES

_SPELLINGS = {**ALIASES, **{ours: theirs for theirs, ours in ALIASES.items()}}
"""Sampling parameters that have two names; a call may take only one of them."""


def near(name: str, known: Iterable[str]) -> str:
    """``; did you mean …?`` for a name that is like one of ``known``; empty where none is."""
    names = list(known)
    if _SPELLINGS.get(name) in names:
        return f"; did you mean {_SPELLINGS[name]}?"
    found = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {found[0]}?" if found else ""
