"""Text that is the same in every run of a program but stands behind text that is not.

The cache keeps prefixes: what follows an argument or a value is found again only where that has the
same text too. Put before it, fixed text would be found by every run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from ramet.runtime.program.blocks import arms
from ramet.runtime.program.instructions import (
    Arg,
    Fork,
    Gen,
    Instruction,
    Join,
    Part,
    Program,
    Ref,
    Repeat,
    RoleBegin,
    RoleEnd,
    Select,
    Switch,
    Text,
    Warm,
)

LEAST_TOKENS = 16
"""Fixed text of fewer tokens, such as a word that leads to the answer, is no finding."""
_HEAD = 60


@dataclass(frozen=True, slots=True)
class Behind:
    """A run of fixed text, its tokens, and the line that appends it."""

    text: str
    tokens: int
    where: str

    @property
    def head(self) -> str:
        return self.text if len(self.text) <= _HEAD else self.text[: _HEAD - 1] + "…"


@dataclass(frozen=True, slots=True)
class Finding:
    """The first variable text of a prompt, ``shared`` fixed tokens before it, and the fixed text
    behind it. ``prompts``: how many generations of the program begin like this."""

    variable: str
    kind: str
    where: str
    shared: int
    behind: tuple[Behind, ...]
    prompts: int = 1

    @property
    def gained(self) -> int:
        """Tokens that more of each run would find cached, were the fixed text before it."""
        return sum(run.tokens for run in self.behind)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a prompt. ``text`` is ``None`` where it varies, and then ``key`` says which part of
    the program it is; without either it is the border of a message."""

    where: str
    text: str | None = None
    key: tuple[int, int] | None = None
    part: Part = ""


def findings(
    program: Program,
    count: Callable[[str], int],
    least: int = LEAST_TOKENS,
    *,
    cut: bool = False,
) -> list[Finding]:
    """What would be reused in another order, most first. ``count`` says how many tokens a text has.
    ``cut``: the program is the beginning of one, so that texts without a generation count too.

    Only prompts up to a stream's first generation are looked at: what is generated varies, and text
    behind it has its place there."""
    found: dict[tuple[int, int], Finding] = {}
    for prompt in _prompts(program, cut):
        one = _finding(prompt, count)
        if one is None or one[1].gained < least:
            continue
        key, finding = one
        known = found.get(key)
        if known is not None:
            most = max(known, finding, key=lambda item: item.gained)
            finding = replace(most, prompts=known.prompts + 1)
        found[key] = finding
    return sorted(found.values(), key=lambda finding: -finding.gained)


Open = dict[int, list[_Piece]]
"""What streams hold that have not generated yet."""


def _prompts(program: Program, cut: bool) -> Iterable[list[_Piece]]:
    """What stands before the first generation of each stream that has one."""
    open_: Open = {0: []}
    yield from _walk(program.instructions, open_, itertools.count())
    if cut:
        yield from open_.values()


def _walk(
    steps: Iterable[Instruction], open_: Open, numbers: Iterator[int]
) -> Iterable[list[_Piece]]:
    """The same of a block. Changes ``open_``; ``numbers`` tell instructions apart."""
    for step in steps:
        number = next(numbers)
        pieces = open_.get(step.stream)
        if pieces is None:
            continue
        if isinstance(step, Text):
            for place, part in enumerate(step.parts):
                if isinstance(part, str):
                    pieces.append(_Piece(step.line, text=part))
                else:
                    pieces.append(_Piece(step.line, key=(number, place), part=part))
        elif isinstance(step, (RoleBegin, RoleEnd)):
            pieces.append(_Piece(step.line))
        elif isinstance(step, Fork):
            open_.update({child: [*pieces] for child in step.children})
        elif isinstance(step, (Gen, Select, Warm)):
            yield pieces
            if not isinstance(step, Warm):
                del open_[step.stream]
        elif isinstance(step, Join) and step.mode == "concate_and_append":
            del open_[step.stream]  # the text that it appends was generated
        elif isinstance(step, Repeat):
            before = set(open_)
            yield from _walk(step.body, open_, numbers)  # later turns begin with the first
            for stream in open_.keys() - before:
                del open_[stream]
        elif isinstance(step, Switch):
            yield from _walk_arms(step, open_, numbers, number)


def _walk_arms(
    step: Switch, open_: Open, numbers: Iterator[int], number: int
) -> Iterable[list[_Piece]]:
    """Each arm goes on from what is before it; behind them stands what varies with the value."""
    pieces = open_[step.stream]
    ends: list[list[_Piece] | None] = []
    for arm in arms(step):
        inside: Open = {step.stream: [*pieces]}
        yield from _walk(arm, inside, numbers)
        ends.append(inside.get(step.stream))
    open_ends = [end for end in ends if end is not None]
    if not open_ends:
        del open_[step.stream]
    elif len(open_ends) == 1:
        open_[step.stream] = open_ends[0]
    elif any(len(end) > len(pieces) for end in open_ends):
        decides = next((part for part in step.value if not isinstance(part, str)), "")
        pieces.append(_Piece(step.line, key=(number, 0), part=decides))


def _finding(
    pieces: list[_Piece], count: Callable[[str], int]
) -> tuple[tuple[int, int], Finding] | None:
    at = next((place for place, piece in enumerate(pieces) if piece.key is not None), None)
    if at is None:
        return None
    first = pieces[at]
    assert first.key is not None
    before = sum(run.tokens for run in _runs(pieces[:at], count))
    behind = tuple(_runs(pieces[at + 1 :], count))
    return first.key, Finding(_shown(first.part), _kind(first.part), first.where, before, behind)


def _runs(pieces: list[_Piece], count: Callable[[str], int]) -> Iterable[Behind]:
    """Fixed text, joined where nothing stands between."""
    text, where = "", ""
    for piece in [*pieces, _Piece("")]:
        if piece.text is not None:
            where = where if text else piece.where
            text += piece.text
        elif text:
            yield Behind(text, count(text), where)
            text = ""


def _shown(part: Part) -> str:
    if isinstance(part, Ref):
        return f"{{{part.name}@{part.stream}}}" if part.stream else f"{{{part.name}}}"
    return f"{{{part.name}}}" if isinstance(part, Arg) else part


def _kind(part: Part) -> str:
    return "the value" if isinstance(part, Ref) else "the argument"
