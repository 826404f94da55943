"""Instructions as taken in: names resolved to the cells that hold their values."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..protocol.errors import ErrorInfo
from ..protocol.sampling import SamplingParams
from .cell import Cell
from .instructions import Instruction

Resolved = str | Cell | ErrorInfo
"""A literal, a value to wait for, or why there is none (raised when the instruction runs)."""


@dataclass(slots=True)
class Gather:
    """One variable of a `Join`: a cell for each child (``None``: it has no such variable)."""

    name: str
    sources: list[Cell | None]
    target: Cell


@dataclass(slots=True)
class Scope:
    """A stream as taken in: its names, and what is open."""

    names: dict[str, Cell]
    parent: int | None = None
    depth: int = 0
    role: str | None = None
    own: dict[str, Cell] = field(default_factory=dict[str, Cell])
    open_scopes: list[str] = field(default_factory=list[str])
    ended: bool = False
    joined: bool = False

    def bind(self, name: str, cell: Cell) -> None:
        self.names[name] = cell
        self.own[name] = cell

    def inside(self) -> Scope:
        """The stream as a block of it begins."""
        return Scope(dict(self.names), self.parent, self.depth, self.role)


@dataclass(slots=True)
class Block:
    """A `Switch` or `Repeat` as taken in. ``scope``: its stream's names, as the arm or turn that
    runs binds them. ``outside``: what its references to streams around it mean. ``left``: what
    it binds, for those that come after it. ``reads``: how often the model is asked in an arm or a
    turn, at most. ``level``: how many blocks are around its arms, itself among them. ``turns`` (or
    arms) have begun; ``scopes`` are those of the newest, ``ends`` tell when what it forks ends."""

    scope: Scope
    outside: dict[tuple[int, str], Resolved]
    left: dict[str, Cell]
    reads: int
    level: int
    turns: int = 0
    scopes: dict[int, Scope] = field(default_factory=dict[int, Scope])
    ends: tuple[Cell, ...] = ()


@dataclass(slots=True)
class Taken:
    """An instruction with its names resolved. ``cell`` is what it binds, if it binds anything."""

    instruction: Instruction
    parts: tuple[Resolved, ...] = ()
    choices: tuple[tuple[Resolved, ...], ...] = ()
    cell: Cell | None = None
    gathers: list[Gather] = field(default_factory=list[Gather])
    block: Block | None = None
    params: SamplingParams | None = None
    """Of a generation, once they are known."""
    to_come: int = 0
    """Generations and selections that `Ahead` counts for it."""

    def fail(self, error: ErrorInfo) -> None:
        """Fail all that this instruction would have bound."""
        if self.cell is not None:
            self.cell.fail(error)
        for gather in self.gathers:
            gather.target.fail(error)
        if self.block is not None:
            for cell in self.block.left.values():
                cell.fail(error)


def describe(instruction: Instruction) -> str:
    """What to call an instruction in an error: its tag, and its name or role when it has one."""
    tag = str(instruction.__struct_config__.tag)
    label = getattr(instruction, "name", None) or getattr(instruction, "role", None)
    return f"{tag} {label!r}" if label else tag
