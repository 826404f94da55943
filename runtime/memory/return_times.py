"""How soon what is cached is read again, learned from what was.

Nodes of a kind that have been left alone for the same time are taken to be alike. Of each kind and
each stretch of such time, what is counted is for how long nodes were there, and how many were read
then: together a rate. A node that is evicted, or becomes one of another kind, was there until then
and says nothing of later.
"""

from __future__ import annotations

import math
from collections.abc import Callable

_STRETCHES = 56
"""Two an octave, in ticks of the tree's clock."""
_UNIT = 8
"""Levels an octave of rates."""
_BELIEF = 2.0
"""What is thought of a rate before anything was seen counts as much as so many reads."""
_LEARNED_EVERY = 1024
_HALVED_EVERY = 4096
"""Spells after which all that was seen counts half, so that what changes is noticed."""


def stretch_of(age: int) -> int:
    """The stretch of time in which ``age`` lies."""
    more = age + 1
    octave = more.bit_length() - 1
    upper = more >> (octave - 1) & 1 if octave else 0
    return min(2 * octave + upper, _STRETCHES - 1)


def start_of(stretch: int) -> int:
    """The first age that lies in it, or in a later one where it is empty."""
    octave, upper = divmod(stretch, 2)
    return (1 << octave) - 1 + (1 << octave >> 1) * upper


_STARTS = [start_of(stretch) for stretch in range(_STRETCHES + 1)]
_WIDTHS = [max(_STARTS[i + 1] - _STARTS[i], 1) for i in range(_STRETCHES)]


class ReturnTimes:
    """Rates of ``kinds`` kinds of nodes. ``expected``: reads a tick of a kind at an age, for as
    long as nothing else is known."""

    def __init__(self, kinds: int, expected: Callable[[int, int], float]) -> None:
        self._expected = expected
        self._begun, self._ended, self._read = (
            [[0.0] * _STRETCHES for _ in range(kinds)] for _ in range(3)
        )
        self._spells = 0
        self._levels = [[0] * _STRETCHES for _ in range(kinds)]
        self._learn()

    def level(self, kind: int, age: int) -> int:
        """Higher is sooner: the logarithm of the rate of such nodes."""
        return self._levels[kind][stretch_of(age)]

    def spell(self, kind: int, begun: int, ended: int, *, read: bool) -> None:
        """A node was of this kind from one age to another, and was then ``read``, or not."""
        last = stretch_of(ended)
        self._begun[kind][stretch_of(begun)] += 1
        self._ended[kind][last] += 1
        self._read[kind][last] += read
        self._spells += 1
        if self._spells % _LEARNED_EVERY == 0:
            self._learn()
        if self._spells % _HALVED_EVERY == 0:
            for rows in (self._begun, self._ended, self._read):
                for row in rows:
                    row[:] = [0.5 * count for count in row]

    def _learn(self) -> None:
        for kind, levels in enumerate(self._levels):
            there = 0.0
            begun, ended, read = self._begun[kind], self._ended[kind], self._read[kind]
            for i, width in enumerate(_WIDTHS):
                # Who comes or goes within a stretch is there for half of it.
                ticks = (there + 0.5 * (begun[i] - ended[i])) * width
                there += begun[i] - ended[i]
                thought = self._expected(kind, _STARTS[i])
                rate = (read[i] + _BELIEF) / (max(ticks, 0.0) + _BELIEF / thought)
                levels[i] = math.floor(_UNIT * math.log2(rate))
