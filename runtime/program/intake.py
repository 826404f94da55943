"""Taking instructions in: order is checked and names are resolved, before anything runs.

Every reference resolves to an instruction that was taken in earlier, so what runs later can wait
for any value without a cycle, and a program reads the same however it is cut into pieces. A block
is looked at once, with its `Switch` or `Repeat`; its instructions are taken in as it is entered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..protocol.errors import BadInputError, ErrorInfo, MissingValueError, ProgramError
from .blocks import Checked, arms, most_reads
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
    Repeat,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    Switch,
    Text,
)
from .limits import Limits
from .taken import Block, Gather, Resolved, Scope, Taken, describe

__all__ = ["Gather", "Intake", "Resolved", "Taken", "describe"]


@dataclass(slots=True)
class _Totals:
    """What all of a program has, its blocks included. ``numbers``: those that its instructions
    give to streams; ``made``: how many streams there have been."""

    args: Mapping[str, Any]
    limits: Limits
    ops: set[int] = field(default_factory=set[int])
    numbers: set[int] = field(default_factory=lambda: {ROOT})
    made: int = 1
    count: int = 0
    checked: dict[int, Checked] = field(default_factory=dict[int, Checked])


class Intake:
    """Resolves one program's instructions in the order in which they come.

    Inside of another, it looks at a block that may run later; inside of a `Block`, it takes in one
    that is entered.
    """

    def __init__(
        self,
        totals: _Totals,
        scopes: dict[int, Scope],
        outer: Intake | Block | None = None,
        level: int = 0,
    ) -> None:
        self._totals = totals
        self._limits = totals.limits
        self._scopes = scopes
        self._outer = outer
        self._level = level
        self._own = next(iter(scopes)) if level else None
        self._runs = not isinstance(outer, Intake)
        self._new = not isinstance(outer, Block)
        self._refs: set[tuple[int, str]] = set()
        self._handlers: dict[type, Callable[[Scope, Any, Taken], None]] = {
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
            Switch: self._switch,
            Repeat: self._repeat,
        }

    @classmethod
    def of(cls, args: Mapping[str, Any], limits: Limits) -> Intake:
        """For a program with these arguments."""
        return cls(_Totals(args, limits), {ROOT: Scope({})})

    def take(self, instruction: Instruction) -> Taken:
        """Raises `ProgramError` for what no program may hold: an unknown or ended stream, an op
        number used twice, roles inside roles, a join of a stream that is no child, too much."""
        totals = self._totals
        self._count(instruction)
        scope = self._scopes.get(instruction.stream)
        if scope is None:
            raise _refuse(instruction, self._no_stream(instruction.stream))
        if scope.ended:
            raise _refuse(instruction, f"stream {instruction.stream} has ended")
        if self._new and instruction.op >= 0:
            if instruction.op in totals.ops:
                raise _refuse(instruction, f"op {instruction.op} is used twice")
            totals.ops.add(instruction.op)
        taken = Taken(instruction)
        handler = self._handlers.get(type(instruction))
        if handler is not None:
            handler(scope, instruction, taken)
        return taken

    def enter(self, taken: Taken, arm: Sequence[Instruction]) -> list[Taken]:
        """Take in an arm, or the next turn, of a block that runs. Raises `ProgramError` for too
        much."""
        block, instruction = taken.block, taken.instruction
        assert block is not None
        self._count(instruction)  # turns in which nothing is done would else be free
        block.turns += 1
        if isinstance(instruction, Repeat) and instruction.count is not None:
            number = Cell(instruction.count)
            number.set(str(block.turns))
            block.scope.bind(instruction.count, number)
        block.scopes = {instruction.stream: block.scope}
        inner = Intake(self._totals, block.scopes, block, block.level)
        return [inner.take(one) for one in arm]

    def until(self, taken: Taken) -> tuple[Resolved, ...]:
        """The value that a repeat's condition looks at, as of the turn that has run."""
        block, instruction = taken.block, taken.instruction
        assert block is not None
        assert isinstance(instruction, Repeat)
        assert instruction.until is not None
        inner = Intake(self._totals, block.scopes, block, block.level)
        return inner._resolve(instruction, instruction.until.value)

    def _count(self, instruction: Instruction) -> None:
        if self._runs:
            self._totals.count += 1
        if self._totals.count > self._limits.instructions:
            raise _refuse(instruction, f"more than {self._limits.instructions} instructions")

    # --- instructions, one method each ---

    def _text(self, _: Scope, instruction: Text, taken: Taken) -> None:
        taken.parts = self._resolve(instruction, instruction.parts)

    def _gen(self, scope: Scope, instruction: Gen, taken: Taken) -> None:
        taken.cell = Cell(instruction.name or "")
        if instruction.name is not None:
            scope.bind(instruction.name, taken.cell)

    def _select(self, scope: Scope, instruction: Select, taken: Taken) -> None:
        taken.choices = tuple(self._resolve(instruction, choice) for choice in instruction.choices)
        taken.cell = Cell(instruction.name or "")
        if instruction.name is not None:
            scope.bind(instruction.name, taken.cell)

    def _bind(self, scope: Scope, instruction: Bind, taken: Taken) -> None:
        taken.parts = self._resolve(instruction, instruction.parts)
        taken.cell = Cell(instruction.name)
        scope.bind(instruction.name, taken.cell)

    def _role_begin(self, scope: Scope, instruction: RoleBegin, _: Taken) -> None:
        if scope.role is not None:
            raise _refuse(instruction, f"role {scope.role!r} is still open; roles do not nest")
        scope.role = instruction.role

    def _role_end(self, scope: Scope, instruction: RoleEnd, _: Taken) -> None:
        if scope.role != instruction.role:
            what = f"role {scope.role!r} is open" if scope.role else "no role is open"
            raise _refuse(instruction, f"{what}, so {instruction.role!r} cannot end")
        scope.role = None

    def _fork(self, scope: Scope, instruction: Fork, _: Taken) -> None:
        totals = self._totals
        if scope.depth >= self._limits.depth:
            raise _refuse(instruction, f"forks nest deeper than {self._limits.depth}")
        if self._runs:
            totals.made += len(instruction.children)
        known = totals.made if self._runs else len(totals.numbers) + len(instruction.children)
        if known > self._limits.streams:
            raise _refuse(instruction, f"more than {self._limits.streams} streams")
        for child in instruction.children:
            if child in (totals.numbers if self._new else self._scopes):
                raise _refuse(instruction, f"stream {child} exists already")
            totals.numbers.add(child)
            self._scopes[child] = Scope(
                dict(scope.names), instruction.stream, scope.depth + 1, scope.role
            )

    def _join(self, scope: Scope, instruction: Join, taken: Taken) -> None:
        children: list[Scope] = []
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

    def _gather(self, scope: Scope, children: list[Scope], taken: Taken) -> None:
        """Lists of what is new in the children: bound there, and not the parent's own name."""
        for name in dict.fromkeys(name for child in children for name in child.own):
            known = scope.names.get(name)
            if known is not None and not known.gathered:
                continue
            target = Cell(name, gathered=True)
            sources = [child.own.get(name) for child in children]
            taken.gathers.append(Gather(name, sources, target))
            scope.bind(name, target)

    def _scope_begin(self, scope: Scope, instruction: ScopeBegin, _: Taken) -> None:
        scope.open_scopes.append(instruction.name)

    def _scope_end(self, scope: Scope, instruction: ScopeEnd, taken: Taken) -> None:
        if not scope.open_scopes or scope.open_scopes.pop() != instruction.name:
            raise _refuse(instruction, f"no variable scope {instruction.name!r} is innermost")
        taken.cell = Cell(instruction.name)
        scope.bind(instruction.name, taken.cell)

    def _end(self, scope: Scope, instruction: End, _: Taken) -> None:
        if instruction.stream == self._own:
            raise _refuse(instruction, f"stream {instruction.stream} cannot end inside a block")
        scope.ended = True

    def _switch(self, scope: Scope, instruction: Switch, taken: Taken) -> None:
        taken.parts = self._resolve(instruction, instruction.value)
        self._block(scope, instruction, taken)

    def _repeat(self, scope: Scope, instruction: Repeat, taken: Taken) -> None:
        if not 1 <= instruction.times <= self._limits.turns:
            raise _refuse(
                instruction, f"times must be 1 to {self._limits.turns}, not {instruction.times}"
            )
        self._block(scope, instruction, taken)

    # --- blocks ---

    def _block(self, scope: Scope, instruction: Switch | Repeat, taken: Taken) -> None:
        if self._level >= self._limits.blocks:
            raise _refuse(instruction, f"blocks nest deeper than {self._limits.blocks}")
        checked = self._totals.checked.get(id(instruction))
        if checked is None:
            checked = self._check(scope, instruction)
            self._totals.checked[id(instruction)] = checked
        outside = {
            (stream, name): self._lookup(instruction, Ref(stream, name))
            for stream, name in checked.refs
            if stream != instruction.stream
        }
        inside = scope.inside()
        left: dict[str, Cell] = {}
        for name, gathered in checked.names.items():
            known = scope.names.get(name)
            left[name] = Cell(name, gathered or (known is not None and known.gathered))
            scope.bind(name, left[name])
        taken.block = Block(inside, outside, left, checked.reads, self._level + 1)

    def _check(self, scope: Scope, instruction: Switch | Repeat) -> Checked:
        """Look at all arms as if each were taken. Raises `ProgramError`."""
        stream = instruction.stream
        refs: set[tuple[int, str]] = set()
        names: dict[str, bool] = {}
        for arm in arms(instruction):
            inside = scope.inside()
            if isinstance(instruction, Repeat) and instruction.count is not None:
                inside.bind(instruction.count, Cell(instruction.count))
            inner = Intake(self._totals, {stream: inside}, self, self._level + 1)
            for one in arm:
                inner.take(one)
            if isinstance(instruction, Repeat) and instruction.until is not None:
                inner._resolve(instruction, instruction.until.value)
            if inside.role != scope.role:
                open_ = f"role {inside.role!r} is open" if inside.role else "no role is open"
                raise _refuse(instruction, f"at the end of a block {open_}, unlike before it")
            if inside.open_scopes:
                raise _refuse(instruction, f"scope {inside.open_scopes[-1]!r} is open at the end")
            refs |= inner._refs
            for name, cell in inside.own.items():
                names[name] = names.get(name, False) or cell.gathered
        reads = max(map(most_reads, arms(instruction)))
        return Checked(instruction, frozenset(refs), names, reads)

    def _exists(self, stream: int) -> bool:
        """Whether a reference can be to this stream."""
        if stream in self._scopes:
            return True
        return isinstance(self._outer, Intake) and self._outer._exists(stream)

    def _no_stream(self, stream: int) -> str:
        if self._exists(stream):
            return f"stream {stream} is not of this block, which can only refer to it"
        if stream in self._totals.numbers:
            return f"stream {stream} is of a block, and there is none outside of it"
        return f"stream {stream} does not exist"

    # --- names ---

    def _resolve(self, instruction: Instruction, parts: Iterable[Part]) -> tuple[Resolved, ...]:
        return tuple(
            part if isinstance(part, str) else self._lookup(instruction, part) for part in parts
        )

    def _lookup(self, instruction: Instruction, part: Ref | Arg) -> Resolved:
        where = instruction.line or None
        if isinstance(part, Arg):
            args = self._totals.args
            if part.name in args:
                return str(args[part.name])
            message = f"{describe(instruction)} needs argument {part.name!r}, which was not given"
            return ErrorInfo.of(BadInputError(message, where=where, param=part.name))
        scope = self._scopes.get(part.stream)
        if scope is None:
            return self._outside(instruction, part)
        cell = scope.names.get(part.name)
        if cell is not None:
            return cell
        known = ", ".join(sorted(scope.names)) or "none"
        message = (
            f"{describe(instruction)} refers to {part.name!r}, which stream {part.stream} has not"
            f" bound before it (known: {known})"
        )
        return ErrorInfo.of(MissingValueError(message, where=where, param=part.name))

    def _outside(self, instruction: Instruction, ref: Ref) -> Resolved:
        if isinstance(self._outer, Block):
            return self._outer.outside[ref.stream, ref.name]
        if not self._exists(ref.stream):
            raise _refuse(instruction, self._no_stream(ref.stream))
        self._refs.add((ref.stream, ref.name))
        return ""  # looked up as the outermost block around it is taken in


def _refuse(instruction: Instruction, why: str) -> ProgramError:
    return ProgramError(f"{describe(instruction)}: {why}", where=instruction.line or None)
