"""Whose turn a step is, where prompts and rows that decode do not share steps."""

from __future__ import annotations

from .rows import Rows

WORTH = 0.5
"""What a step of prompts costs every row that decodes, in steps of its own: that much even the
smallest costs, so few prompts wait for more."""
MOST_WAITED = 4
"""Steps that prompts wait for at most."""
MOST_AT_ONCE = 8
"""Steps of prompts, one after another, that rows wait for at most."""


class Turns:
    """Prompts wait until what they lose by that is as much as the rows that decode would lose by a
    step of theirs, the rule of economic order quantities; and go on for some steps while they are
    more than those rows, as a step costs about the same however many decode.

    A prompt that has begun, or output that is forced, waits for one step at most: nobody reads what
    KV its row has.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._owed = 0
        """Steps that prompts have waited for since the last of theirs, all together."""
        self._waited = 0
        self._at_once = 0

    def prompts_next(self, waiting: int) -> bool:
        """Whether the next step is for prompts alone, ``waiting`` of which have no row yet. It is
        not where nothing decodes: then a step needs no captured size. The turn counts as taken."""
        rows = self._rows
        decoding, begun = len(rows.decoding), rows.begun.tolist()
        ready = min(waiting, len(rows.requests) - rows.running) + len(begun)
        prompts = bool(ready) and (not decoding or self._pays(ready, decoding, begun))
        if prompts:
            self._owed = self._waited = 0
            self._at_once += 1
        else:
            self._owed += ready
            self._waited += bool(ready)
            self._at_once = 0
        return prompts and decoding > 0

    def _pays(self, ready: int, decoding: int, begun: list[int]) -> bool:
        """Whether ``decoding`` rows should wait for a step of some of ``ready`` prompts."""
        if self._at_once:
            return ready > decoding and self._at_once < MOST_AT_ONCE
        if any(not self._follows(row) for row in begun):
            return True
        return self._owed + ready >= decoding * WORTH or self._waited + 1 >= MOST_WAITED

    def _follows(self, row: int) -> bool:
        """Whether a row's prompt is what follows an output, and can wait as one without a row."""
        request = self._rows.requests[row]
        return request is not None and request.took_over
