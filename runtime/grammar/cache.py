"""Compiled grammars, and refusals, that are remembered. Plain data; its user locks."""

from __future__ import annotations

import time
from collections import OrderedDict

from ..protocol.errors import ErrorInfo, GrammarError
from .matcher import Grammar

MAX_REFUSALS = 1024
RETRY_SECONDS = 60.0


class GrammarCache:
    """Least recently used first out, bounded by the bytes that the grammars say they hold."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._grammars: OrderedDict[str, tuple[Grammar, int]] = OrderedDict()
        """With the bytes that each held when it was last asked for."""
        self.nbytes = 0
        self._refusals: OrderedDict[str, tuple[ErrorInfo, float]] = OrderedDict()

    def find(self, key: str) -> Grammar | GrammarError | None:
        """A grammar, a fresh copy of the error that compiling it met, or None."""
        kept = self._grammars.get(key)
        if kept is not None:
            self.keep(key, kept[0])  # weighed anew: a grammar grows while it is used
            return kept[0]
        found = self._refusals.get(key)
        if found is None:
            return None
        info, until = found
        if time.monotonic() >= until:
            del self._refusals[key]
            return None
        self._refusals.move_to_end(key)
        return GrammarError(info.message, where=info.where, param=info.param)

    def keep(self, key: str, grammar: Grammar) -> None:
        """One larger than the whole bound is not kept."""
        if (before := self._grammars.pop(key, None)) is not None:
            self.nbytes -= before[1]
        size = grammar.nbytes
        if size > self._max_bytes:
            return  # nor do others go for it
        self._grammars[key] = grammar, size
        self.nbytes += size
        while self.nbytes > self._max_bytes:
            _, (_, gone) = self._grammars.popitem(last=False)
            self.nbytes -= gone

    def refuse(self, key: str, error: GrammarError, *, for_good: bool) -> None:
        """Remember a failure; one that a quieter machine might not meet, for a minute."""
        until = float("inf") if for_good else time.monotonic() + RETRY_SECONDS
        self._refusals[key] = (ErrorInfo.of(error), until)
        self._refusals.move_to_end(key)
        if len(self._refusals) > MAX_REFUSALS:
            self._refusals.popitem(last=False)

    def __len__(self) -> int:
        return len(self._grammars)
