"""What is known after certain tokens, mask rows above all: what one output had computed, others of
its grammar copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .matcher import MaskRow

_PLACE_BYTES = 400
"""A place without its row: two objects and a way to it."""
_TOKEN_BYTES = 40
_FEW_WORDS = 64
"""A row with at most so many words that are not zero is kept as those: most rows are, and a copy of
a whole one takes longer, in memory that is new."""


class Place:
    """Where an output can be: after certain tokens. ``row``: None, a row, or the numbers of its
    words that are not zero, with those. ``seen``: its row was asked for before. ``done``: whether
    nothing more can come, ``forced``: the tokens that must; None where nobody asked."""

    __slots__ = ("after", "done", "forced", "row", "seen")

    def __init__(self) -> None:
        self.after: dict[int, Place] = {}
        self.done: bool | None = None
        self.forced: tuple[int, ...] | None = None
        self.row: MaskRow | tuple[np.ndarray, MaskRow] | None = None
        self.seen = False


class MaskCache:
    """A tree of places, shared by the outputs of a grammar, of at most ``max_bytes``.

    Most outputs soon go where no other ever comes. So when half of the memory is used only those
    rows are kept that were asked for twice, and when all of it is, the tree begins anew; outputs
    that are on their way then do without. Threads may use it at the same time: rows never change.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.nbytes = 0
        self.start = Place()

    def next(self, places: list[Place], token: int) -> Place | None:
        """Where ``places``, one after the other from the start, lead by one more token; None if
        that is not remembered any more."""
        if not places or places[0] is not self.start:
            return None
        here = places[-1].after
        place = here.get(token)
        if place is None and self._has_room(_PLACE_BYTES):
            here[token] = place = Place()
        return place

    def copy(self, place: Place, out: MaskRow) -> bool:
        """Write the row of a place, if it is there."""
        row = place.row
        if row is None:
            return False
        if isinstance(row, tuple):
            out.fill(0)
            out[row[0]] = row[1]
        else:
            out[:] = row
        return True

    def keep(self, place: Place, row: MaskRow) -> None:
        """Remember the row of a place, if it is worth it."""
        if not place.seen and 2 * self.nbytes > self._max_bytes:
            place.seen = True
            return
        words = (row != 0).nonzero()[0]
        few = len(words) <= _FEW_WORDS
        if self._has_room(12 * len(words) + 200 if few else row.nbytes):
            place.row = (words, row[words]) if few else row.copy()

    def keep_forced(self, place: Place, tokens: Sequence[int]) -> None:
        """Remember the tokens that must come at a place; most often there are none."""
        if not tokens or self._has_room(_TOKEN_BYTES * (len(tokens) + 2)):
            place.forced = tuple(tokens)

    def _has_room(self, size: int) -> bool:
        """Whether so much may be added; if not, there is room for what comes next."""
        if self.nbytes + size > self._max_bytes:
            self._begin_anew()
            return False
        self.nbytes += size
        return True

    def _begin_anew(self) -> None:
        """Outputs that stand still, as they wait or think, hold places: each lets go of the others,
        or every such output would hold the tree of its day."""
        todo, self.start = [self.start], Place()
        self.nbytes = 0
        while todo:
            place = todo.pop()
            todo += place.after.values()
            place.after.clear()
            place.row = None
