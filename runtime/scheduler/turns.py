"""Whose turn a step is, where prompts and rows that decode do not share steps."""

from __future__ import annotations

from .batch import IntArray
from .preemption import Preemption
from .rows import Rows
from .waiting import Waiting

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

    Of two classes the more urgent does not wait for the other: its prompts come at once, and its
    rows for as long as prompts can wait. Else a prompt that has begun, or output that is forced,
    waits for one step at most: nobody reads what KV its row has.
    """

    def __init__(
        self, rows: Rows, waiting: Waiting, preemption: Preemption, prompt_tokens: int
    ) -> None:
        """``prompt_tokens``: how many a step of prompts takes."""
        self._rows = rows
        self._waiting = waiting
        self._preemption = preemption
        self._prompt_tokens = prompt_tokens
        self._begun: IntArray = rows.begun
        """When a turn was last asked for."""
        self._owed = 0
        """Steps that prompts have waited for since the last of theirs, all together."""
        self._waited = 0
        self._at_once = 0

    def prompts_next(self) -> bool:
        """Whether the next step is for prompts alone. It is not where nothing decodes: then a step
        needs no captured size. No turn is taken by asking."""
        self._begun = self._rows.begun
        if not self._somebody:
            return False
        decoding = self._rows.decoding
        return len(decoding) > 0 and self._pays(decoding)

    def taken(self, *, prompts: bool, asked: bool) -> None:
        """A step was planned, with ``prompts`` or with rows that decode; ``asked``: it was to be
        one of prompts."""
        if prompts or asked:  # who was asked in vain is asked again as late as one that comes now
            self._owed = self._waited = 0
        if prompts:
            self._at_once += 1
            return
        self._at_once = 0
        if self._somebody:
            self._owed += self._ready
            self._waited += 1

    def hurry(self) -> None:
        """Somebody made way for a prompt: it waits for no others."""
        self._waited = MOST_WAITED

    @property
    def _somebody(self) -> bool:
        """Whether any prompt is there that a row is there for."""
        return len(self._begun) > 0 or (len(self._waiting) > 0 and self._rows.has_room)

    @property
    def _ready(self) -> int:
        """How many prompts have a row, or could be let in by the next step, about."""
        rows, waiting, begun = self._rows, self._waiting, self._begun
        if not waiting or not rows.has_room:
            return len(begun)
        if (rows.target[begun] - rows.computed[begun]).sum() >= self._prompt_tokens:
            return len(begun)
        if self._preemption.refused is not None:
            return len(begun) + 1
        over = sum(
            max(waiting.count_of[name] - max(room, 0), 0)
            for name, room in self._preemption.room().items()
        )
        return len(begun) + min(len(waiting) - over, len(rows.requests) - rows.running)

    def _pays(self, decoding: IntArray) -> bool:
        """Whether rows that decode should wait for a step of prompts."""
        rows, waiting = self._rows, self._waiting
        levels = rows.level[self._begun].tolist()
        if waiting and rows.has_room:
            levels.append(waiting.most_urgent)
        level, others = min(levels), int(rows.level[decoding].min())
        ready = self._ready
        if self._at_once:
            return level <= others and ready > len(decoding) and self._at_once < MOST_AT_ONCE
        if level < others or self._waited + 1 >= MOST_WAITED:
            return True
        if level > others:
            return False
        if any(not self._follows(row) for row in self._begun.tolist()):
            return True
        return ready > 0 and self._owed + ready >= len(decoding) * WORTH

    def _follows(self, row: int) -> bool:
        """Whether a row's prompt is what follows an output, none of it computed yet: it can wait as
        one without a row."""
        request = self._rows.requests[row]
        assert request is not None
        return request.took_over and int(self._rows.computed[row]) == request.cached_tokens
