"""A regular language as a tree of four shapes, and its spelling in the dialect all backends share.

The tree holds sets of characters and nothing that a dialect could read differently: classes, case
and flags are resolved before. `portable` writes it so that Rust's regex syntax (outlines-core,
llguidance) and Python's ``re`` read the same language.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from .charset import Ranges, count, ranges_of


@dataclass(frozen=True)
class Chars:
    """One character of a set; the empty set matches nothing at all."""

    ranges: Ranges

    @property
    def size(self) -> int:
        return 1


@dataclass(frozen=True)
class Sequence:
    """One part after the other; no parts: the empty text."""

    parts: tuple[Chars | Sequence | Union | Repeat, ...]

    @cached_property
    def size(self) -> int:
        return sum(part.size for part in self.parts)


@dataclass(frozen=True)
class Union:
    """Any one of at least two parts."""

    parts: tuple[Chars | Sequence | Union | Repeat, ...]

    @cached_property
    def size(self) -> int:
        return sum(part.size for part in self.parts)


@dataclass(frozen=True)
class Repeat:
    """``low`` to ``high`` times the body; no ``high``: without end."""

    body: Chars | Sequence | Union | Repeat
    low: int
    high: int | None

    @cached_property
    def size(self) -> int:
        """Characters of the pattern with its repeats written out."""
        return self.body.size * max(self.low if self.high is None else self.high, 1)


Tree = Chars | Sequence | Union | Repeat

EMPTY = Sequence(())
NOTHING = Chars(())


def sequence(parts: Iterable[Tree]) -> Tree:
    """The parts in a row: nothing if one of them is."""
    flat: list[Tree] = []
    for part in parts:
        if part == NOTHING:
            return NOTHING
        flat += part.parts if isinstance(part, Sequence) else (part,)
    return flat[0] if len(flat) == 1 else Sequence(tuple(flat))


def union(parts: Iterable[Tree]) -> Tree:
    """Any of the parts; single characters beside each other become one set."""
    kept: dict[Tree, None] = {}
    chars: list[tuple[int, int]] = []
    for part in parts:
        for inner in part.parts if isinstance(part, Union) else (part,):
            if isinstance(inner, Chars):
                chars += inner.ranges
            else:
                kept[inner] = None
    alternatives: list[Tree] = [*([Chars(ranges_of(chars))] if chars else []), *kept]
    if not alternatives:
        return NOTHING
    return alternatives[0] if len(alternatives) == 1 else Union(tuple(alternatives))


def repeat(body: Tree, low: int, high: int | None) -> Tree:
    """``low`` to ``high`` times the body."""
    if body == NOTHING:
        return EMPTY if low == 0 else NOTHING
    if body == EMPTY or high == 0:
        return EMPTY
    if isinstance(body, Repeat) and body.low <= 1:  # without gaps: (a{1,2}){2,3} is a{2,6}
        low *= body.low
        high = None if high is None or body.high is None else high * body.high
        body = body.body
    return body if (low, high) == (1, 1) else Repeat(body, low, high)


def literal(text: str) -> Tree:
    """Exactly this text."""
    return sequence(_one_character(c) for c in text)


@lru_cache(maxsize=4096)
def _one_character(char: str) -> Chars:
    return Chars(((ord(char), ord(char)),))


def fixed_text(tree: Tree) -> str | None:
    """The one text of the language where the tree spells it out; None otherwise."""
    if isinstance(tree, Chars):
        return chr(tree.ranges[0][0]) if count(tree.ranges) == 1 else None
    if isinstance(tree, Sequence):
        texts = [fixed_text(part) for part in tree.parts]
        return None if None in texts else "".join(t for t in texts if t is not None)
    return None


def alphabet(tree: Tree) -> Ranges:
    """Every character that a match can hold."""
    pairs: list[tuple[int, int]] = []
    todo: list[Tree] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, Chars):
            pairs += node.ranges
        else:
            todo += [node.body] if isinstance(node, Repeat) else node.parts
    return ranges_of(pairs)


def portable(tree: Tree) -> str:
    """The tree as a pattern for the whole text, without anchors, flags or named classes.

    Raises ValueError for a language without any text: no spelling of it is portable.
    """
    if isinstance(tree, Chars):
        return _class(tree.ranges)
    if isinstance(tree, Sequence):
        return "".join(
            f"(?:{portable(part)})" if isinstance(part, Union) else portable(part)
            for part in tree.parts
        )
    if isinstance(tree, Union):
        return "|".join(portable(part) for part in tree.parts)
    body = portable(tree.body)
    if not isinstance(tree.body, Chars):
        body = f"(?:{body})"
    return body + _times(tree.low, tree.high)


def _times(low: int, high: int | None) -> str:
    if high is None:
        return {0: "*", 1: "+"}.get(low, f"{{{low},}}")
    if (low, high) == (0, 1):
        return "?"
    return f"{{{low}}}" if low == high else f"{{{low},{high}}}"


def _class(ranges: Ranges) -> str:
    if not ranges:
        raise ValueError("nothing matches")
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _character(ranges[0][0])
    return "[" + "".join(_span(first, last) for first, last in ranges) + "]"


def _span(first: int, last: int) -> str:
    if first == last:
        return _character(first)
    return f"{_character(first)}{'-' if last > first + 1 else ''}{_character(last)}"


def _character(point: int) -> str:
    char = chr(point)
    if char.isascii() and (char.isalnum() or char in "_ "):
        return char
    if point < 0x80:
        return f"\\x{point:02x}"
    return f"\\u{point:04x}" if point <= 0xFFFF else f"\\U{point:08x}"
