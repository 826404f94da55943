"""Whether a value is what was asked for: known at once, or when a compiled program runs."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast, get_args

from ramet.runtime.program.blocks import matches as text_matches
from ramet.runtime.program.instructions import Match
from ramet.runtime.protocol import BadInputError

from .source import here
from .symbols import Symbol, is_plain

MODES: tuple[str, ...] = get_args(Match)


class Matches:
    """A value and the texts that it may match; true or false as soon as the value is known."""

    __slots__ = ("line", "match", "texts", "value")

    def __init__(self, value: str, texts: tuple[str, ...], match: Match) -> None:
        self.value = value
        self.texts = texts
        self.match: Match = match
        self.line = here()

    def holds(self, value: str) -> bool:
        """Whether this value would match."""
        return any(text_matches(value, text, self.match) for text in self.texts)

    def __bool__(self) -> bool:
        if not is_plain(self.value):
            return bool(Symbol(self.value))  # raises, naming the line
        return self.holds(self.value)

    def __repr__(self) -> str:
        return f"matches({self.value!r}, {', '.join(map(repr, self.texts))})"


def matches(
    value: Any, *texts: Any, match: Literal["strip", "exact", "contains"] = "strip"
) -> Matches:
    """Whether a value is one of ``texts``: but for blanks at both ends (strip), exactly, or as a
    part of it (contains). It can be used as a bool where the value is known, and as what
    `State.repeat` goes on ``until``. Raises `BadInputError`."""
    check_match(match)
    if not texts:
        raise BadInputError("matches needs a text", param="texts", where=here() or None)
    return Matches(value_text(value), tuple(case_text(text) for text in texts), match)


def check_match(match: object) -> None:
    """Raises `BadInputError` for a mode that there is not."""
    if match not in MODES:
        raise BadInputError(
            f"match must be one of {', '.join(MODES)}, not {match!r}",
            param="match",
            where=here() or None,
        )


def value_text(value: Any) -> str:
    """The text that a value is compared as. An enum's member is its value, as where it is
    generated. Raises `BadInputError` for what has none."""
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)):
        return str(value)
    kind = type(value).__name__
    raise BadInputError(f"a {kind} cannot be compared with texts", where=here() or None)


def case_text(value: Any) -> str:
    """The text of a case, which must be known while a program is compiled."""
    text = value_text(value)
    if not is_plain(text):
        raise BadInputError("a case must be a fixed text", param="cases", where=here() or None)
    return str(text)


def case_texts(cases: object) -> dict[str, Any]:
    """The cases of a switch by their text. Raises `BadInputError`."""
    if not isinstance(cases, Mapping):
        raise BadInputError(
            f"cases must be a dict of text to what is done, not {cases!r}",
            param="cases",
            where=here() or None,
        )
    found: dict[str, Any] = {}
    for key, arm in cast("Mapping[Any, Any]", cases).items():
        text = case_text(key)
        if text in found:
            raise BadInputError(
                f"case {text!r} is there twice", param="cases", where=here() or None
            )
        found[text] = arm
    return found


Arm = Callable[[], None]
"""What an arm or a turn does, called with nothing."""
