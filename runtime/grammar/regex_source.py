r"""The text of a regex: spellings that Python's ``re`` lacks, and where its constructs stand.

``\p{Lu}``, ``\pL``, ``\x{1F600}``, ``\u{1F600}``, ``(?<name>…)`` and ``\z`` are read as Rust, PCRE
and JavaScript write them. A class becomes one character of a private plane, which
`regex_parse` takes back for the class.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache

from ..protocol.errors import GrammarError
from .charset import LAST, Ranges, complement, unicode_property
from .unicode_scripts import library_class

_FIRST_STAND_IN = 0x10F000
_PROPERTY = re.compile(r"[pP](?:\{(\^?)([^{}]*)\}|([A-Z]))")
_CODE_POINT = re.compile(r"[xu]\{([0-9a-fA-F]{1,8})\}")
_GROUPS = (
    ("(?=", "look-ahead"),
    ("(?!", "look-ahead"),
    ("(?<=", "look-behind"),
    ("(?<!", "look-behind"),
    ("(?>", "atomic group"),
    ("(?P=", "backreference"),
    ("(?(", "conditional group"),
)


@dataclass
class Source:
    """``text``: the pattern as Python's ``re`` reads it. ``classes``: what stand-in characters of
    it mean. ``places``: first place of each construct that may have to be refused, in the text
    as it was given."""

    text: str = ""
    classes: dict[int, Ranges] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    spans: list[tuple[int, int]] = field(default_factory=list)
    """First and last place of each [class], in the text as it was given."""
    _origins: list[int] = field(default_factory=list)

    def origin(self, at: int) -> int:
        """The place in the given text of a place in ``text``."""
        if not self._origins:
            return 0
        return self._origins[at] if at < len(self._origins) else self._origins[-1] + 1

    def add(self, text: str, at: int) -> None:
        self.text += text
        self._origins += [at] * len(text)

    def stand_in(self, ranges: Ranges) -> str:
        for point, known in self.classes.items():
            if known is ranges:
                return chr(point)
        point = _FIRST_STAND_IN + len(self.classes)
        self.classes[point] = ranges
        return chr(point)


def read_source(pattern: str) -> Source:
    """Read a pattern. Raises `GrammarError` with the place of a class that is not known."""
    if any(_FIRST_STAND_IN <= ord(c) < _FIRST_STAND_IN + 0x1000 for c in pattern):
        raise GrammarError("the regex holds a private character of plane 16")
    source = Source()
    pieces: list[tuple[str, int]] = []
    at, opened, inside = 0, 0, -1  # the open class: its bracket, its first character
    while at < len(pattern):
        char = pattern[at]
        piece, after = char, at + 1
        if char == "\\":
            piece, after = _escape(source, pattern, at, inside >= 0)
        elif inside >= 0:
            if char == "]" and at > inside:
                source.spans.append((opened, at))
                inside = -1
            elif char == "[" and (match := re.compile(r"\[:\^?\w+:\]").match(pattern, at)):
                raise GrammarError(
                    f"POSIX classes such as {match[0]} are not supported", where=f"character {at}"
                )
        elif char == "[":
            # A "]" that comes first is a character of the class.
            first = at + 2 if pattern[at + 1 : at + 2] == "^" else at + 1
            opened, inside = at, first
        elif char == "(":
            piece, after = _group(source, pattern, at)
        elif char in "^$":
            source.places.setdefault("anchor", at)
        elif char == "+" and at and pattern[at - 1] in "+*?}":
            source.places.setdefault("possessive quantifier", at)
        elif char == "{":
            source.places.setdefault("repeat", at)
        pieces.append((piece, at))
        at = after
    for piece, place in pieces:
        source.add(piece, place)
    return source


def _group(source: Source, pattern: str, at: int) -> tuple[str, int]:
    for opening, name in _GROUPS:
        if pattern.startswith(opening, at):
            source.places.setdefault(name, at)
    if pattern.startswith("(?<", at) and pattern[at + 3 : at + 4] not in ("=", "!"):
        return "(?P<", at + 3
    return "(", at + 1


def _property(name: str) -> Ranges | None:
    ranges = unicode_property(name)
    return library_class(name) if ranges is None else ranges


@lru_cache(maxsize=256)
def _wanted(name: str, negated: bool) -> Ranges:
    ranges = _property(name) or ()
    return complement(ranges) if negated else ranges


def _escape(source: Source, pattern: str, at: int, inside: bool) -> tuple[str, int]:
    """(what Python reads instead, place after) of the escape at ``at``."""
    letter = pattern[at + 1 : at + 2]
    if match := _PROPERTY.match(pattern, at + 1):
        negated, name = match[1] == "^", match[2] or match[3] or ""
        if _property(name) is None:
            raise GrammarError(
                f"{pattern[at : match.end()][:60]} is no class of Unicode",
                where=f"character {at}",
            )
        return source.stand_in(_wanted(name, (letter == "P") != negated)), match.end()
    if match := _CODE_POINT.match(pattern, at + 1):
        point = int(match[1], 16)
        if point > LAST or 0xD800 <= point <= 0xDFFF:
            raise GrammarError(f"{match[0]} is no character", where=f"character {at}")
        return re.escape(chr(point)), match.end()
    if letter == "z" and not inside:
        return r"\Z", at + 2
    if letter in ("b", "B") and not inside:
        source.places.setdefault("word boundary", at)
    elif letter in ("A", "Z") and not inside:
        source.places.setdefault("anchor", at)
    elif letter in tuple("123456789") and not inside:
        source.places.setdefault("backreference", at)
    return pattern[at : at + 2], at + 2
