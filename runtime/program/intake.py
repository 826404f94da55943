"""Taking instructions in: order is checked and names are resolved, before anything runs.

Every reference resolves to an instruction that was taken in earlier, so what runs later can wait
for any value without a cycle, and a program reads the same however it is cut into pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..protocol.errors import (
    BadInputError,
    ErrorInfo,
    MissingValueError,
    ProgramError,
)
from .cell import Cell
from .instructions import (
    ROOT,
    Arg,
    Bind,
    End,
    Fork,
    Gen,
    Instruction,
    Join,
    Part,
    Ref,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    Text,
)
from .limits import Limits

Resolved = str | Cell | ErrorInfo
"""A literal, a value to wait for, or why there is none (raised when the instruction runs)."""


@dataclass(slots=True)
class Gather:
    """One variable of a `Join`: a cell for each child (``None``: it has no such variable)."""

    name: str
    sources: list[Cell | None]
    target: Cell


@dataclass(slots=True)
class Taken:
    """An instruction with its names resolved. ``cell`` is what it binds, if it binds anything."""

    instruction: Instruction
    parts: tuple[Resolved, ...] = ()
    choices: tuple[tuple[Resolved, ...], ...] = ()
    cell: Cell | None = None
    gathers: list[Gather] = field(default_factory=list[Gather])
    to_come: bool = False
    """Whether `Ahead` counts it."""

    def fail(self, error: ErrorInfo) -> None:
        """Fail all that this instruction would have bound."""
        if self.cell is not None:
            self.cell.fail(error)
        for gather in self.gathers:
            gather.target.fail(error)


@dataclass(slots=True)
class _Scope:
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


def describe(instruction: Instruction) -> str:
    """What to call an instruction in an error: its tag, and its name or role when it has one."""
    tag = str(instruction.__struct_config__.tag)
    label = getattr(instruction, "name", None) or getattr(instruction, "role", None)
    return f"{tag} {label!r}" if label else tag


class Intake:
    """Resolves one program's instructions in the order in which they come."""

    def __init__(self, args: Mapping[str, Any], limits: Limits) -> None:
        self._args = args
        self._limits = limits
        self._scopes: dict[int, _Scope] = {ROOT: _Scope({})}
        self._ops: set[int] = set()
        self._count = 0
        self._handlers: dict[type, Callable[[_Scope, Any, Taken], None]] = {
            Text: self._text,
            Gen: self._gen,
            Select: self._select,
            RoleBegin: self._role_begin,
            RoleEnd: self._role_end,
            Fork: self._fork,
            Join: self._join,
            Bind: self._bind,
            ScopeBegin: self._scope_begin,
            ScopeEnd: self._scope_end,
            End: self._end,
        }

    def take(self, instruction: Instruction) -> Taken:
        """Raises `ProgramError` for what no program may hold: an unknown or ended stream, an op
        number used twice, roles inside roles, a join of a stream that is no child, too much."""
        self._count += 1
        if self._count > self._limits.instructions:
            raise _refuse(instruction, f"more than {self._limits.instructions} instructions")
        scope = self._scopes.get(instruction.stream)
        if scope is None:
            raise _refuse(instruction, f"stream {instruction.stream} does not exist")
        if scope.ended:
            raise _refuse(instruction, f"stream {instruction.stream} has ended")
        if instruction.op >= 0:
            if instruction.op in self._ops:
                raise _refuse(instruction, f"op {instruction.op} is used twice")
            self._ops.add(instruction.op)
        taken = Taken(instruction)
        handler = self._handlers.get(type(instruction))
        if handler is not None:
            handler(scope, instruction, taken)
        return taken

    def _text(self, _: _Scope, instruction: Text, taken: Taken) -> None:
        taken.parts = self._resolve(instruction, instruction.parts)

    def _gen(self, scope: _Scope, instruction: Gen, taken: Taken) -> None:
        taken.cell = Cell(instruction.name or "")
        if instruction.name is not None:
            scope.bind(instruction.name, taken.cell)

    def _select(self, scope: _Scope, instruction: Select, taken: Taken) -> None:
        taken.choices = tuple(self._resolve(instruction, choice) for choice in instruction.choices)
        taken.cell = Cell(instruction.name or "")
        if instruction.name is not None:
            scope.bind(instruction.name, taken.cell)

    def _bind(self, scope: _Scope, instruction: Bind, taken: Taken) -> None:
        taken.parts = self._resolve(instruction, instruction.parts)
        taken.cell = Cell(instruction.name)
        scope.bind(instruction.name, taken.cell)

    def _role_begin(self, scope: _Scope, instruction: RoleBegin, _: Taken) -> None:
        if scope.role is not None:
            raise _refuse(instruction, f"role {scope.role!r} is still open; roles do not nest")
        scope.role = instruction.role

    def _role_end(self, scope: _Scope, instruction: RoleEnd, _: Taken) -> None:
        if scope.role != instruction.role:
            what = f"role {scope.role!r} is open" if scope.role else "no role is open"
            raise _refuse(instruction, f"{what}, so {instruction.role!r} cannot end")
        scope.role = None

    def _fork(self, scope: _Scope, instruction: Fork, _: Taken) -> None:
        if scope.depth >= self._limits.depth:
            raise _refuse(instruction, f"forks nest deeper than {self._limits.depth}")
        if len(self._scopes) + len(instruction.children) > self._limits.streams:
            raise _refuse(instruction, f"more than {self._limits.streams} streams")
        for child in instruction.children:
            if child in self._scopes:
                raise _refuse(instruction, f"stream {child} exists already")
            self._scopes[child] = _Scope(
                dict(scope.names), instruction.stream, scope.depth + 1, scope.role
            )

    def _join(self, scope: _Scope, instruction: Join, taken: Taken) -> None:
        children: list[_Scope] = []
        for number in dict.fromkeys(instruction.children):
            child = self._scopes.get(number)
            if child is None or child.parent != instruction.stream:
                raise _refuse(
                    instruction, f"stream {number} is no child of stream {instruction.stream}"
                )
            if child.joined:
                raise _refuse(instruction, f"stream {number} is joined already")
            child.joined = child.ended = True
            children.append(child)
        if instruction.mode == "gather_variable":
            self._gather(scope, children, taken)

    def _gather(self, scope: _Scope, children: list[_Scope], taken: Taken) -> None:
        """Lists of what is new in the children: bound there, and not the parent's own name."""
        for name in dict.fromkeys(name for child in children for name in child.own):
            known = scope.names.get(name)
            if known is not None and not known.gathered:
                continue
            target = Cell(name, gathered=True)
            sources = [child.own.get(name) for child in children]
            taken.gathers.append(Gather(name, sources, target))
            scope.bind(name, target)

    def _scope_begin(self, scope: _Scope, instruction: ScopeBegin, _: Taken) -> None:
        scope.open_scopes.append(instruction.name)

    def _scope_end(self, scope: _Scope, instruction: ScopeEnd, taken: Taken) -> None:
        if not scope.open_scopes or scope.open_scopes.pop() != instruction.name:
            raise _refuse(instruction, f"no variable scope {instruction.name!r} is innermost")
        taken.cell = Cell(instruction.name)
        scope.bind(instruction.name, taken.cell)

    def _end(self, scope: _Scope, _: End, __: Taken) -> None:
        scope.ended = True

    def _resolve(self, instruction: Instruction, parts: Iterable[Part]) -> tuple[Resolved, ...]:
        return tuple(
            part if isinstance(part, str) else self._lookup(instruction, part) for part in parts
        )

    def _lookup(self, instruction: Instruction, part: Ref | Arg) -> Resolved:
        where = instruction.line or None
        if isinstance(part, Arg):
            if part.name in self._args:
                return str(self._args[part.name])
            message = f"{describe(instruction)} needs argument {part.name!r}, which was not given"
            return ErrorInfo.of(BadInputError(message, where=where, param=part.name))
        scope = self._scopes.get(part.stream)
        if scope is None:
            raise _refuse(instruction, f"stream {part.stream} does not exist")
        cell = scope.names.get(part.name)
        if cell is not None:
            return cell
        known = ", ".join(sorted(scope.names)) or "none"
        message = (
            f"{describe(instruction)} refers to {part.name!r}, which stream {part.stream} has not"
            f" bound before it (known: {known})"
        )
        return ErrorInfo.of(MissingValueError(message, where=where, param=part.name))


def _refuse(instruction: Instruction, why: str) -> ProgramError:
    return ProgramError(f"{describe(instruction)}: {why}", where=instruction.line or None)
