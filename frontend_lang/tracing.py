"""Instructions of a function that is called with symbols, blocks of arms and loops among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ramet.runtime.program.instructions import (
    Condition,
    Fork,
    Instruction,
    Match,
    Program,
    Ref,
    Repeat,
    Switch,
)
from ramet.runtime.program.limits import Limits
from ramet.runtime.protocol import ProgramError

from .branch import Binding, Branch, Gathered, Given, Made
from .conditions import Arm, Matches
from .frames import Frame, has_text, head, left
from .recording import Recording
from .source import here
from .symbols import Symbol, SymbolRef, argument, reference

_MOST_BLOCKS = Limits().blocks


class Tracing(Recording):
    """A recording that only keeps its instructions; values are symbols.

    Of a switch every arm is called, of a loop the body once; what they record is a block. What is
    said of names in there holds for every turn: a name that the loop binds anew means the value as
    the turn begins, one taken before the loop what it meant there.
    """

    strict = True

    def __init__(self) -> None:
        super().__init__()
        self.instructions: list[Instruction] = []
        self.arguments: dict[str, None] = {}
        self.inlined: list[Branch] = []
        self.frames: list[Frame] = []
        self._heads: dict[int, Binding] = {}
        self._left: dict[int, int] = {}

    def emit(self, instruction: Instruction) -> None:
        (self.frames[-1] if self.frames else self).instructions.append(instruction)

    def _emit_beside(self, branch: Branch, op: int, instruction: Instruction) -> None:
        around = next((f for f in reversed(self.frames) if f.start < op or branch in f.made), self)
        around.instructions.append(instruction)

    def read(self, branch: Branch, name: str | None, binding: Binding) -> Any:
        for frame in self.frames:
            if name is not None and any(binding is fixed for fixed in frame.fixed):
                frame.read.add(name)
        if isinstance(binding, Given):
            return binding.value
        if isinstance(binding, Gathered):
            return [
                None if item is None else self.read(item.branch, name, item)
                for item in binding.items
            ]
        if name is None:
            raise ProgramError("an unnamed value cannot be referred to while compiling")
        return reference(self.take(branch, name))

    def argument(self, name: str) -> Symbol:
        """The symbol of an argument."""
        self.arguments[name] = None
        return argument(self.owner, name)

    def fresh(self) -> Branch:
        """An empty branch: forked off the root before anything is there."""
        if self.frames:
            raise ProgramError(
                "a program cannot be called in an arm or a loop while it is compiled; "
                "give it the state to go on in: f(s, ...)",
                where=here() or None,
            )
        op = next(self.ops)
        branch = Branch(len(self.branches), (-len(self.inlined) - 1,), self.root, op, last_op=op)
        self.branches.append(branch)
        self.inlined.append(branch)
        return branch

    def close(self) -> None:
        """The function has returned: every open branch reports its end."""
        for branch in self.branches:
            if not branch.ended:
                self.final(branch)
        self.closed = True

    def program(self, name: str) -> Program:
        """What was recorded."""
        head: list[Instruction] = [
            Fork(op=branch.fork_op, children=(branch.stream,)) for branch in self.inlined
        ]
        return Program(
            instructions=(*head, *self.instructions), args=tuple(self.arguments), name=name
        )

    # --- blocks -----------------------------------------------------------------------------------

    def fork(self, branch: Branch, size: int) -> list[Branch]:
        children = super().fork(branch, size)
        if self.frames:
            self.frames[-1].made.extend(children)
            for child in children:
                child.in_block = True
        return children

    def final(self, branch: Branch) -> None:
        if not branch.in_block:  # nobody can ask for the text of one of many
            super().final(branch)

    def switch(
        self, branch: Branch, value: str, cases: dict[str, Arm], default: Arm, match: Match
    ) -> None:
        with self.lock:
            line = here()
            parts = self.parts(value, line)
            start = next(self.ops)
            blocks = {case: self._block(branch, arm, start, None) for case, arm in cases.items()}
            other = self._block(branch, default, start, None)
            op = self._leave(branch, start, [*blocks.values(), other])
            self.emit(
                Switch(
                    stream=branch.stream,
                    op=op,
                    line=line,
                    value=parts,
                    cases={case: tuple(block.instructions) for case, block in blocks.items()},
                    default=tuple(other.instructions),
                    match=match,
                )
            )

    def repeat(
        self,
        branch: Branch,
        body: Arm,
        times: int,
        until: Callable[[], Matches | bool] | None,
        count: str | None,
    ) -> None:
        with self.lock:
            line = here()
            start = next(self.ops)
            conditions: list[Condition] = []

            def turn() -> None:
                body()
                if until is not None:
                    conditions.append(self._condition(until()))

            block = self._block(branch, turn, start, count or "")
            op = self._leave(branch, start, [block])
            self.emit(
                Repeat(
                    stream=branch.stream,
                    op=op,
                    line=line,
                    body=tuple(block.instructions),
                    times=times,
                    until=conditions[0] if conditions else None,
                    count=count,
                )
            )

    def _condition(self, asked: object) -> Condition:
        if not isinstance(asked, Matches):
            raise ProgramError(
                f"what a loop goes on until must be rt.matches(...) to be compiled, not {asked!r}",
                where=here() or None,
            )
        value = self.parts(asked.value, asked.line)
        return Condition(value=value, texts=asked.texts, match=asked.match)

    def _block(self, branch: Branch, call: Arm, start: int, count: str | None) -> Frame:
        """Record what ``call`` does as a block of its own. ``count`` is the name of a loop's
        counter, '' without one, None for an arm."""
        self._check_open(branch, "")
        if len(self.frames) >= _MOST_BLOCKS:
            raise ProgramError(
                f"arms and loops nest deeper than {_MOST_BLOCKS}", where=here() or None
            )
        frame = Frame(branch, start, count is not None, before=branch.names)
        branch.names = dict(branch.names)
        role = branch.role
        if frame.loop:
            self._begin_turn(frame, count or None)
        started = dict(branch.names)
        self.frames.append(frame)
        try:
            call()
        finally:
            self.frames.pop()
            bound = {n: b for n, b in branch.names.items() if b is not started.get(n)}
            if count:
                bound.setdefault(count, branch.names[count])
            branch.names = frame.before
            for made in frame.made:
                made.ended = True
        if branch.role != role:
            open_ = f"a {branch.role} message is open" if branch.role else "no message is open"
            raise ProgramError(
                f"at the end of an arm or a loop's turn {open_}, unlike before it",
                where=here() or None,
            )
        frame.bound = bound
        for name in frame.read.intersection(n for n in bound if n is not None):
            raise ProgramError(
                f"{name!r} is no text before the loop, which reads it and then changes it; "
                "read it before the loop",
                where=here() or None,
            )
        return frame

    def _begin_turn(self, frame: Frame, count: str | None) -> None:
        """Have names mean what they do as a turn begins."""
        branch = frame.branch
        for name, binding in frame.before.items():
            if name is None or name == count:
                continue
            if not has_text(binding):
                frame.fixed.append(binding)
                continue
            op = next(self.ops)
            branch.names[name] = head(op, name, binding)
            self._heads[op] = binding
        if count is not None:
            op = next(self.ops)
            branch.names[count] = Made(op, branch, count)
            if (before := frame.before.get(count)) is not None:
                self._heads[op] = before

    def _leave(self, branch: Branch, start: int, frames: list[Frame]) -> int:
        """The op of a block's instruction; what it may have bound means that from now on."""
        bound: dict[str, list[Binding]] = {}
        for frame in frames:
            for name, binding in frame.bound.items():
                if name is not None:
                    bound.setdefault(name, []).append(binding)
        for name in bound:
            old = branch.names.get(name)
            if old is not None:
                self._rebind(branch, name, old)
        op = self._next(branch)
        self._left[op] = start
        self.blocks.add(op)
        for name, ways in bound.items():
            old = branch.names.get(name)
            if old is not None and not all(name in frame.bound for frame in frames):
                ways.append(old)
            branch.names[name] = left(op, branch, name, ways)
        return op

    def _rebind(self, branch: Branch, name: str, old: Binding) -> None:
        binding: Binding | None = old
        while binding is not None:
            super()._rebind(branch, name, binding)
            binding = self._heads.get(binding.op)

    def refer(self, ref: SymbolRef) -> Ref:
        branch = self.branches[ref.stream]
        if branch.in_block and not any(branch in frame.made for frame in self.frames):
            raise ProgramError(
                f"{ref.name!r} is of a branch of an arm or a loop, which ended with it; "
                "set a variable of the branch around it",
                where=here() or None,
            )
        known = super().refer(ref)
        if known.name != ref.name:
            return known
        binding = branch.names.get(ref.name)
        if binding is None:
            raise ProgramError(
                f"{ref.name!r} is of an arm or a loop, and not known outside of it; read it there",
                where=here() or None,
            )
        if binding.op == ref.op or self._left.get(binding.op, ref.op) < ref.op < binding.op:
            return known
        origin: Binding | None = binding
        while origin is not None and origin.op != ref.op:
            origin = self._heads.get(origin.op)
        if origin is None:
            raise ProgramError(
                f"{ref.name!r} was read in an arm or a loop and has changed since; read it again",
                where=here() or None,
            )
        return Ref(ref.stream, self._save(branch, ref.name, origin))

    def _check_open(self, branch: Branch, line: str) -> None:
        super()._check_open(branch, line)
        frame = self.frames[-1] if self.frames else None
        if frame is not None and branch is not frame.branch and branch not in frame.made:
            raise ProgramError(
                "in an arm or a loop only the state that it is called with can grow, and what is "
                "forked off it there",
                where=line or here() or None,
            )
