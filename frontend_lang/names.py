"""Names that are not there: what was probably meant."""

from __future__ import annotations

from collections.abc import Iterable

from ramet.runtime.protocol.nearest import did_you_mean
from ramet.runtime.protocol.sampling import ALIASES

_SPELLINGS = {**ALIASES, **{ours: theirs for theirs, ours in ALIASES.items()}}
"""Sampling parameters that have two names; a call may take only one of them."""


def near(name: str, known: Iterable[str]) -> str:
    """`did_you_mean`, which knows that some parameters have another name elsewhere."""
    names = list(known)
    if _SPELLINGS.get(name) in names:
        return f"; did you mean {_SPELLINGS[name]}?"
    return did_you_mean(name, names)
