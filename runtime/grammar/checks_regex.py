r"""Regexes and choices, checked and read into a tree before anything is queued.

The dialect is that of Python's ``re`` on ``str``, of the whole text (``fullmatch``): ``\d``, ``\w``
and ``\s`` are those of Unicode ((?a) makes them ASCII's), ``.`` is anything but a newline ((?s) any
character), lazy quantifiers mean the same as greedy ones. Beyond it ``\p{…}`` of categories and
scripts, ``\x{…}``, ``\u{…}``, ``(?<name>…)`` and ``\z`` are read. All backends are given the same
spelled-out pattern, so they cannot differ. What has no automaton is refused by name and place.
"""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import dataclass
from functools import cached_property, lru_cache
from re import _constants as op  # pyright: ignore[reportAttributeAccessIssue]
from re import _parser  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any

from ..protocol.errors import GrammarError
from .charset import ANY, Ranges, category, complement, folded, ranges_of
from .regex_source import Source, read_source
from .regex_tree import EMPTY, NOTHING, Chars, Tree, literal, portable, repeat, sequence, union
from .spec import Spec

MAX_PATTERN = 50_000
"""Characters of a pattern."""
MAX_WRITTEN_OUT = 100_000
"""Characters of a pattern with its repeats written out."""
MAX_SPELLED = 300_000
"""Ranges of characters in all classes of a pattern: some 11 bytes of the spelled-out one each."""
MAX_CHOICES = 20_000
MAX_CHOICE_TEXT = 1_000_000
"""Characters of all choices together."""

_REFUSED = {
    op.ASSERT: ("look-ahead", "look-behind"),
    op.ASSERT_NOT: ("look-ahead", "look-behind"),
    op.GROUPREF: ("backreference",),
    op.GROUPREF_IGNORE: ("backreference",),
    op.GROUPREF_EXISTS: ("conditional group",),
    op.ATOMIC_GROUP: ("atomic group",),
    op.POSSESSIVE_REPEAT: ("possessive quantifier",),
}
_CLASSES = {
    op.CATEGORY_DIGIT: "d",
    op.CATEGORY_NOT_DIGIT: "D",
    op.CATEGORY_WORD: "w",
    op.CATEGORY_NOT_WORD: "W",
    op.CATEGORY_SPACE: "s",
    op.CATEGORY_NOT_SPACE: "S",
}
_FOLDING_COSTS = 1_000
"""Ranges that finding the other cases of a class counts for."""
_STARTS = (op.AT_BEGINNING, op.AT_BEGINNING_STRING)
_ENDS = (op.AT_END, op.AT_END_STRING)
_NEWLINE: Ranges = ((10, 10),)


@dataclass(frozen=True)
class Language:
    """A checked regular language."""

    tree: Tree

    @cached_property
    def pattern(self) -> str:
        """The language spelled for every backend, for the whole text."""
        return portable(self.tree)

    @property
    def size(self) -> int:
        """Characters with all repeats written out: what an automaton grows with, at least."""
        return self.tree.size


@lru_cache(maxsize=64)
def check_regex(pattern: str) -> Language:
    """Read a regex. Raises `GrammarError` that names what cannot be honoured and its place."""
    if len(pattern) > MAX_PATTERN:
        raise GrammarError(f"the regex has {len(pattern):,} characters; {MAX_PATTERN:,} may be")
    source = read_source(pattern)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "possible nested set" is for authors, not for us
            parsed = _parser.parse(source.text)
        tree = _Reader(source).read(parsed, parsed.state.flags, True, True)
        if tree == NOTHING:
            raise GrammarError("no text can match the regex", where=_empty_class(pattern, source))
        language = Language(tree)
    except re.error as error:
        for name in ("backreference", "look-behind", "conditional group"):
            if name in source.places:  # what is wrong with it does not matter
                raise _refusal(source, name, f"not supported in a constraint: {name}") from None
        where = None if error.pos is None else f"character {source.origin(error.pos)}"
        raise GrammarError(f"not a regex: {error.msg}", where=where) from None
    except OverflowError:
        raise _refusal(source, "repeat", "a repeat is too large") from None
    except RecursionError:
        raise GrammarError("the regex is nested too deeply") from None
    if language.size > MAX_WRITTEN_OUT:
        raise _refusal(
            source,
            "repeat",
            f"repeats too large: {language.size:,} characters when written out, "
            f"{MAX_WRITTEN_OUT:,} may be",
        )
    return language


@lru_cache(maxsize=8)
def check_choices(text: str) -> Language:
    """Read a JSON list of strings of which the output is one. Raises `GrammarError`."""
    if len(text) > 2 * MAX_CHOICE_TEXT:
        raise GrammarError(f"the choices have {len(text):,} characters in all: too many")
    try:
        choices: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"choices are not JSON: {error}") from None
    if not isinstance(choices, list) or not choices:
        raise GrammarError("choices must be a list of at least one string")
    if len(choices) > MAX_CHOICES:
        raise GrammarError(f"{len(choices):,} choices; {MAX_CHOICES:,} may be")
    for place, choice in enumerate(choices):
        if not isinstance(choice, str):
            raise GrammarError(
                f"choices must be strings, not {type(choice).__name__}", where=f"choice {place}"
            )
        if any(0xD800 <= ord(c) <= 0xDFFF for c in choice):
            raise GrammarError("half of a surrogate pair", where=f"choice {place}")
    if sum(map(len, choices)) > MAX_CHOICE_TEXT:
        raise GrammarError(f"the choices have over {MAX_CHOICE_TEXT:,} characters in all")
    tree = union(literal(choice) for choice in dict.fromkeys(choices))
    return Language(tree)


def language_of(spec: Spec) -> Language:
    """The checked language of a ``regex`` or ``choice`` spec. Raises `GrammarError`."""
    return check_regex(spec.text) if spec.kind == "regex" else check_choices(spec.text)


def _empty_class(pattern: str, source: Source) -> str | None:
    """The place of the first class that no character is in."""
    for first, last in source.spans:
        try:
            check_regex(pattern[first : last + 1])
        except GrammarError:
            return f"character {first}"
    return None


def _refusal(source: Source, name: str, message: str) -> GrammarError:
    place = source.places.get(name)
    return GrammarError(message, where=None if place is None else f"character {place}")


class _Reader:
    """Python's parse tree into ours. ``starts``/``ends``: whether the text certainly begins/ends
    here, so that an anchor is satisfied."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._sets: dict[Any, Ranges] = {}
        self._ranges = 0

    def read(self, items: Any, flags: int, starts: bool, ends: bool) -> Tree:
        items = list(items)
        empty = [_takes_nothing(item) for item in items]
        parts: list[Tree] = []
        for place, item in enumerate(items):
            first = starts and all(empty[:place])
            last = ends and all(empty[place + 1 :])
            parts.append(self._item(item, flags, first, last))
        return sequence(parts)

    def _item(self, item: tuple[Any, Any], flags: int, starts: bool, ends: bool) -> Tree:
        code, value = item
        if code in _REFUSED:
            raise self._unsupported(_REFUSED[code])
        if code is op.AT:
            return self._anchor(value, starts, ends)
        if code is op.BRANCH:
            return union(self.read(branch, flags, starts, ends) for branch in value[1])
        if code is op.SUBPATTERN:
            _, added, removed, inner = value
            return self.read(inner, (flags | added) & ~removed, starts, ends)
        if code in (op.MAX_REPEAT, op.MIN_REPEAT):
            low, high, inner = value
            high = None if high == op.MAXREPEAT else int(high)
            once = high is not None and high <= 1
            return repeat(self.read(inner, flags, starts and once, ends and once), low, high)
        if code is op.IN and any(kind is op.FAILURE for kind, _ in value):
            return NOTHING
        if code is op.FAILURE:
            return NOTHING
        return Chars(self._set_once(code, value, flags))

    def _set_once(self, code: Any, value: Any, flags: int) -> Ranges:
        key = (code, tuple(value) if code is op.IN else value, flags)
        if key not in self._sets:
            self._sets[key] = self._set(code, value, flags)
            if flags & re.IGNORECASE and code is op.IN:
                self._ranges += _FOLDING_COSTS
        self._ranges += len(self._sets[key])
        if self._ranges > MAX_SPELLED:
            raise GrammarError("the regex has too many and too large classes of characters")
        return self._sets[key]

    def _anchor(self, value: Any, starts: bool, ends: bool) -> Tree:
        if (value in _STARTS and starts) or (value in _ENDS and ends):
            return EMPTY
        if value in (*_STARTS, *_ENDS):
            raise _refusal(
                self._source,
                "anchor",
                "an anchor that is not at the end of the pattern"
                if value in _ENDS
                else "an anchor that is not at the start of the pattern",
            )
        raise self._unsupported(("word boundary",))

    def _unsupported(self, names: tuple[str, ...]) -> GrammarError:
        found = [name for name in names if name in self._source.places] or list(names[:1])
        name = min(found, key=lambda n: self._source.places.get(n, 0))
        return _refusal(self._source, name, f"not supported in a constraint: {name}")

    def _set(self, code: Any, value: Any, flags: int) -> Ranges:
        ascii_only = bool(flags & re.ASCII)
        if code is op.ANY:
            return ANY if flags & re.DOTALL else complement(_NEWLINE)
        if code is op.LITERAL:
            return self._fold(self._points(value), flags)
        if code is op.NOT_LITERAL:
            return complement(self._fold(self._points(value), flags))
        if code is not op.IN:
            raise GrammarError(f"the regex holds a construct that is not supported: {code}")
        negated = bool(value) and value[0][0] is op.NEGATE
        pairs: list[tuple[int, int]] = []
        for kind, what in value:
            if kind is op.LITERAL:
                pairs += self._points(what)
            elif kind is op.RANGE:
                if self._source.classes.keys() & set(what):
                    raise GrammarError("a class cannot be an end of a range")
                pairs += ranges_of([what])
            elif kind is op.CATEGORY:
                pairs += category(_CLASSES[what], ascii_only)
        ranges = self._fold(ranges_of(pairs), flags)
        return complement(ranges) if negated else ranges

    def _points(self, point: int) -> Ranges:
        if 0xD800 <= point <= 0xDFFF:
            raise GrammarError("the regex asks for half of a surrogate pair")
        return self._source.classes.get(point, ((point, point),))

    def _fold(self, ranges: Ranges, flags: int) -> Ranges:
        if not flags & re.IGNORECASE:
            return ranges
        return folded(ranges, bool(flags & re.ASCII))


def _takes_nothing(item: tuple[Any, Any]) -> bool:
    """Whether an item is an anchor or a group of nothing else: it takes no character."""
    code, value = item
    if code is op.AT:
        return True
    if code is op.SUBPATTERN:
        return all(_takes_nothing(inner) for inner in value[3])
    if code is op.BRANCH:
        return all(_takes_nothing(inner) for branch in value[1] for inner in branch)
    return False
