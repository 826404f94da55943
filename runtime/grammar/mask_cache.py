"""Mask rows by the tokens they come after: what one output had computed, others of its grammar
copy."""

from __future__ import annotations

from .matcher import MaskRow

_PLACE_BYTES = 400
"""A place without its row: two objects and a way to it."""


class Place:
    """Where an output can be: after certain tokens. ``seen``: its row was asked for before."""

    __slots__ = ("after", "row", "seen")

    def __init__(self) -> None:
        self.after: dict[int, Place] = {}
        self.row: MaskRow | None = None
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

    def keep(self, place: Place, row: MaskRow) -> None:
        """Remember the row of a place, if it is worth it."""
        if not place.seen and 2 * self.nbytes > self._max_bytes:
            place.seen = True
            return
        if self._has_room(row.nbytes):
            place.row = row.copy()

    def _has_room(self, size: int) -> bool:
        """Whether so much may be added; if not, there is room for what comes next."""
        if self.nbytes + size > self._max_bytes:
            self.start = Place()
            self.nbytes = 0
            return False
        self.nbytes += size
        return True
