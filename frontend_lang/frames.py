"""Blocks of a program that is being traced: what an arm or a loop's body has recorded so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ramet.runtime.program.instructions import Instruction

from .branch import Binding, Branch, Gathered, Given, Made, Names


@dataclass(slots=True, eq=False)
class Frame:
    """A block that is open. ``branch`` and what is forked off it inside (``made``) may grow.

    ``start``: instructions with a greater op are of this block. ``before``: the branch's names as
    the block began, ``bound``: what it has bound itself. Names in a loop are bound to a `head`, the
    value as a turn begins, whoever bound it. What has no text that stands for it (``fixed``) must
    not change in the loop once it was ``read`` there."""

    branch: Branch
    start: int
    loop: bool
    instructions: list[Instruction] = field(default_factory=list[Instruction])
    made: list[Branch] = field(default_factory=list[Branch])
    before: Names = field(default_factory=lambda: Names())
    bound: Names = field(default_factory=lambda: Names())
    fixed: list[Binding] = field(default_factory=list[Binding])
    read: set[str] = field(default_factory=set[str])


def has_text(binding: Binding) -> bool:
    """Whether a binding can be referred to as one text."""
    if isinstance(binding, Given):
        return isinstance(binding.value, str)
    return isinstance(binding, Made) and not binding.many


def head(op: int, name: str, binding: Binding) -> Made:
    """What a name means as a turn begins."""
    kind = binding.type if isinstance(binding, Made) else None
    return Made(op, binding.branch, name, kind)


def left(op: int, branch: Branch, name: str, bindings: Iterable[Binding]) -> Made:
    """What a name means behind a block that may have bound it in one of these ways."""
    ways = list(bindings)
    types = {way.type.name: way.type for way in ways if isinstance(way, Made) and way.type}
    one = len(types) == 1 and all(isinstance(way, Made) and way.type for way in ways)
    gathered = any(isinstance(w, Gathered) or (isinstance(w, Made) and w.gathered) for w in ways)
    many = any(not isinstance(w, Given) and (isinstance(w, Gathered) or w.many) for w in ways)
    kind = next(iter(types.values())) if one else None
    return Made(op, branch, name, kind, many=many, gathered=gathered)
