"""Sets of characters as sorted ranges of code points, with the classes that Python's ``re`` knows.

A `Ranges` is a tuple of (first, last) pairs, sorted, disjoint and not touching. Half characters
(surrogates) are in no set: text that is sent or generated cannot hold them.
"""

from __future__ import annotations

import re
import re._casefix as casefix  # pyright: ignore[reportMissingImports]
import sys
import unicodedata
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from functools import cache, lru_cache

Ranges = tuple[tuple[int, int], ...]

LAST = 0x10FFFF
_UTF32 = f"utf-32-{sys.byteorder[0]}e"
_SURROGATES = (0xD800, 0xDFFF)
ANY: Ranges = ((0, 0xD7FF), (0xE000, LAST))

_LONG_NAMES = {
    "letter": "L",
    "uppercaseletter": "Lu",
    "lowercaseletter": "Ll",
    "titlecaseletter": "Lt",
    "modifierletter": "Lm",
    "otherletter": "Lo",
    "mark": "M",
    "number": "N",
    "decimalnumber": "Nd",
    "letternumber": "Nl",
    "othernumber": "No",
    "punctuation": "P",
    "symbol": "S",
    "separator": "Z",
    "spaceseparator": "Zs",
    "other": "C",
    "control": "Cc",
}
_LAST_CASED_PLANE = 1
_LAST_DENSE_PLANE = 3
"""Planes after it hold few characters, which stand at their beginning."""
_ASCII: dict[str, Ranges] = {
    "d": ((48, 57),),
    "w": ((48, 57), (65, 90), (95, 95), (97, 122)),
    "s": ((9, 13), (32, 32)),
}


def ranges_of(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Any (first, last) pairs as `Ranges`."""
    merged: list[list[int]] = []
    for first, last in sorted(pairs):
        if merged and first <= merged[-1][1] + 1:
            merged[-1][1] = max(merged[-1][1], last)
        else:
            merged.append([first, last])
    low, high = _SURROGATES
    result: list[tuple[int, int]] = []
    for first, last in merged:
        if first < low:
            result.append((first, min(last, low - 1)))
        if last > high:
            result.append((max(first, high + 1), last))
    return tuple(pair for pair in result if pair[0] <= pair[1])


def complement(ranges: Ranges) -> Ranges:
    """All characters that are not in ``ranges``."""
    gaps: list[tuple[int, int]] = []
    at = 0
    for first, last in ranges:
        if first > at:
            gaps.append((at, first - 1))
        at = last + 1
    if at <= LAST:
        gaps.append((at, LAST))
    return ranges_of(gaps)


def contains(ranges: Ranges, point: int) -> bool:
    """Whether a code point is in the set."""
    place = bisect_right(ranges, (point, LAST)) - 1
    return place >= 0 and point <= ranges[place][1]


def count(ranges: Ranges) -> int:
    """How many characters the set holds."""
    return sum(last - first + 1 for first, last in ranges)


@cache
def category(letter: str, ascii_only: bool = False) -> Ranges:
    r"""What ``\d``, ``\w`` and ``\s`` match in a ``str``; capital letters are the complements."""
    if letter.isupper():
        return complement(category(letter.lower(), ascii_only))
    if ascii_only:
        return _ASCII[letter]
    runs = re.finditer(rf"\{letter}+", _every_character())
    return ranges_of((run.start(), run.end() - 1) for run in runs)


@lru_cache(maxsize=256)
def unicode_property(name: str) -> Ranges | None:
    r"""The set behind ``\p{name}``: a general category by its short or long name, ``Any``
    or ``ASCII``; None for a name that is not known here."""
    plain = name.replace("_", "").replace(" ", "").replace("-", "").lower()
    plain = plain.removeprefix("generalcategory=").removeprefix("gc=")
    if plain == "any":
        return ANY
    if plain == "ascii":
        return ((0, 127),)
    short = _LONG_NAMES.get(plain, plain)
    pairs = [
        pair
        for key, ranges in _general_categories().items()
        if (key.lower() == short.lower() or (len(short) == 1 and key[0].lower() == short.lower()))
        for pair in ranges
    ]
    if short.lower() == "lc":
        pairs = [pair for key in ("Lu", "Ll", "Lt") for pair in _general_categories()[key]]
    return ranges_of(pairs) if pairs else None


def folded(ranges: Ranges, ascii_only: bool = False) -> Ranges:
    """The set and all characters that ``re.IGNORECASE`` takes for one of its own."""
    key_of, members = _folding()
    few = count(ranges) <= 64
    points = [p for first, last in ranges for p in range(first, last + 1)] if few else key_of
    inside = [p for p in points if p in key_of and (few or contains(ranges, p))]
    pairs = [
        (other, other)
        for point in inside
        for other in members[key_of[point]]
        if not ascii_only or (other < 128 and point < 128)
    ]
    return ranges_of((*ranges, *pairs)) if pairs else ranges


@cache
def _every_character() -> str:
    """All code points in order, so that places are code points."""
    return array("I", range(LAST + 1)).tobytes().decode(_UTF32, "surrogatepass")


@cache
def _general_categories() -> dict[str, Ranges]:
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    first, current = 0, unicodedata.category(chr(0))
    for point in _informative_points():
        name = unicodedata.category(chr(point)) if point <= LAST else ""
        if name != current:
            found[current].append((first, point - 1))
            first, current = point, name
    return {name: ranges_of(pairs) for name, pairs in found.items()}


def _informative_points() -> Iterable[int]:
    """Code points at which a category may begin; those between have that of the one before."""
    dense = (_LAST_DENSE_PLANE + 1) << 16
    yield from range(dense)
    for plane in range(dense, LAST + 1, 0x10000):
        yield from range(plane, plane + 0x2000)
        yield from range(plane + 0xFFFE, plane + 0x10000)
    yield LAST + 1


@cache
def _folding() -> tuple[dict[int, int], dict[int, tuple[int, ...]]]:
    """(character → key of its class, key → members), of characters that have a case."""
    extra: dict[int, tuple[int, ...]] = casefix._EXTRA_CASES  # pyright: ignore
    key_of: dict[int, int] = {}
    members: dict[int, list[int]] = defaultdict(list)
    for point in range((_LAST_CASED_PLANE + 1) << 16):
        small = chr(point).lower()
        low = ord(small[0]) if small != chr(point) else point
        if low != point:
            members[min(low, *extra.get(low, (low,)))].append(point)
    for low in [*members, *extra]:
        key = min(low, *extra.get(low, (low,)))
        members[key] += [low, *extra.get(low, ())]
    groups = {key: tuple(sorted(set(group))) for key, group in members.items()}
    for key, group in groups.items():
        for point in group:
            key_of[point] = key
    return key_of, groups
