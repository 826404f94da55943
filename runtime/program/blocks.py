"""What can be said of a block before it runs: what it refers to, binds, and asks of the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .instructions import Condition, Gen, Instruction, Match, Repeat, Select, Switch, Warm

MOST_READS = 1 << 31
"""A count of what is to come goes no further."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A `Switch` or `Repeat` that was looked at. ``refs``: (stream, name) outside of the streams
    that it forks. ``names``: what it may bind on its own stream, and whether that is a list that a
    join gathered. ``reads``: of its longest arm, or of one turn."""

    instruction: Switch | Repeat
    refs: frozenset[tuple[int, str]]
    names: dict[str, bool]
    reads: int


def arms(instruction: Switch | Repeat) -> list[tuple[Instruction, ...]]:
    """The blocks of an instruction."""
    if isinstance(instruction, Repeat):
        return [instruction.body]
    return [*instruction.cases.values(), instruction.default]


def is_read(instruction: Instruction) -> bool:
    """Whether an instruction has its stream's text read by the model."""
    return isinstance(instruction, Gen | Select | Warm)


def most_reads(instructions: Iterable[Instruction]) -> int:
    """How often the model is asked, at most: a switch counts as its longest arm, a repeat as all
    of its turns."""
    total = 0
    for instruction in instructions:
        if isinstance(instruction, Switch):
            total += max(map(most_reads, arms(instruction)))
        elif isinstance(instruction, Repeat):
            total += instruction.times * most_reads(instruction.body)
        else:
            total += is_read(instruction)
    return min(total, MOST_READS)


def matches(value: str, text: str, match: Match) -> bool:
    """Whether a value is what a case or a condition asks for."""
    if match == "contains":
        return text in value
    if match == "exact":
        return value == text
    return value.strip() == text.strip()


def case_of(instruction: Switch, value: str) -> str | None:
    """The first case that the value matches, if any."""
    return _first(value, instruction.cases, instruction.match)


def holds(condition: Condition, value: str) -> bool:
    """Whether the value matches one of the texts."""
    return _first(value, condition.texts, condition.match) is not None


def _first(value: str, texts: Iterable[str], match: Match) -> str | None:
    value = value.strip() if match == "strip" else value
    return next((text for text in texts if matches(value, text, match)), None)
