"""Python operations become instructions: the part that lazy runs and tracing share."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, Literal

from ramet.runtime.program.blocks import matches
from ramet.runtime.program.instructions import (
    ROOT,
    Bind,
    Fork,
    Gen,
    Instruction,
    Join,
    Match,
    Part,
    Parts,
    Ref,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    Sync,
    Text,
)
from ramet.runtime.protocol import MissingValueError, ProgramError

from .branch import Binding, Branch, Gathered, Given, Made
from .conditions import Arm, Matches
from .expressions import Concat, Expression, GenExpression, RoleExpression, SelectExpression
from .source import here
from .symbols import SymbolRef, is_plain, pieces

JoinMode = Literal["gather_variable", "concate_and_append"]
_owners = itertools.count(1)
_OF_SAMPLES = "; to choose among samples, fork a branch for each, join them and select"


class Recording:
    """Instructions of one program in program order, and its branches.

    Subclasses say in `emit` what becomes of an instruction. Operations may come from several
    threads; each takes the lock.
    """

    stream = False
    """Whether the program's text comes in deltas."""
    strict = False
    """Whether what looks like the remains of a symbol in a text is an error."""

    def __init__(self) -> None:
        self.owner = next(_owners)
        self.lock = threading.RLock()
        self.root = Branch(ROOT)
        self.branches: list[Branch] = [self.root]
        self.ops = itertools.count()
        self.closed = False
        self.labels: dict[int, str | None] = {}
        """The variable of each instruction that generates text."""
        self.blocks: set[int] = set()
        """Instructions that report what others have bound."""
        self._taken: set[tuple[int, str, int]] = set()
        self._saved: dict[tuple[int, str, int], str] = {}

    def emit(self, instruction: Instruction) -> None:
        raise NotImplementedError

    def read(self, branch: Branch, name: str | None, binding: Binding) -> Any:
        """The value that Python gets for ``s[name]``."""
        raise NotImplementedError

    def switch(
        self, branch: Branch, value: str, cases: dict[str, Arm], default: Arm, match: Match
    ) -> None:
        """Do what the first case says that ``value`` matches, or else the default."""
        self._check_open(branch, "")
        text = self.known(value)
        arm = next((arm for case, arm in cases.items() if matches(text, case, match)), default)
        arm()

    def repeat(
        self,
        branch: Branch,
        body: Arm,
        times: int,
        until: Callable[[], Matches | bool] | None,
        count: str | None,
    ) -> None:
        """Do ``body`` up to ``times`` times, until after one of them ``until`` is true."""
        self._check_open(branch, "")
        for turn in range(1, times + 1):
            if count is not None:
                self.set(branch, count, str(turn))
            body()
            if until is None:
                continue
            over = until()
            if over.holds(self.known(over.value)) if isinstance(over, Matches) else over:
                break

    def known(self, text: str) -> str:
        """A text with what it refers to, waited for."""
        raise NotImplementedError

    # --- operations -------------------------------------------------------------------------------

    def append(self, branch: Branch, value: Expression | str) -> None:
        with self.lock:
            self._append(branch, value)

    def set(self, branch: Branch, name: str, value: Any) -> None:
        with self.lock:
            line = here()
            parts = self.parts(value, line) if isinstance(value, str) else (str(value),)
            op = self._next(branch, name)
            self.emit(Bind(stream=branch.stream, op=op, line=line, name=name, parts=parts))
            branch.names[name] = Given(value, op, branch)

    def fork(self, branch: Branch, size: int) -> list[Branch]:
        with self.lock:
            op = self._next(branch)
            children = [branch.child(len(self.branches) + i, op) for i in range(size)]
            self.branches.extend(children)
            streams = tuple(child.stream for child in children)
            self.emit(Fork(stream=branch.stream, op=op, line=here(), children=streams))
            if self.stream:  # so that a child's deltas can begin with what it was forked from
                for child in children:
                    child.start_op = self.sync(child, "text", "")
            return children

    def join(self, branch: Branch, children: list[Branch], mode: JoinMode) -> None:
        with self.lock:
            line = here()
            for child in children:
                self._check_open(child, line)
                self.final(child)
                child.ended = True
            fresh = _fresh(branch, children) if mode == "gather_variable" else []
            op = self._next(branch)
            streams = tuple(child.stream for child in children)
            self.emit(Join(stream=branch.stream, op=op, line=line, children=streams, mode=mode))
            for name in fresh:
                items = [_own(child, name) for child in children]
                branch.names[name] = Gathered(items, op, branch)

    def role_begin(self, branch: Branch, role: str) -> None:
        with self.lock:
            line = here()
            if branch.role is not None:
                raise ProgramError(
                    f"a {role} message cannot begin inside a {branch.role} message",
                    where=line or None,
                )
            branch.role = role
            branch.uses_roles = True
            op = self._next(branch)
            self.emit(RoleBegin(stream=branch.stream, op=op, line=line, role=role))

    def role_end(self, branch: Branch, role: str) -> None:
        with self.lock:
            line = here()
            if branch.role != role:
                open_ = f"a {branch.role} message is open" if branch.role else "none is open"
                raise ProgramError(
                    f"a {role} message cannot end: {open_}",
                    where=line or None,
                )
            branch.role = None
            op = self._next(branch)
            self.emit(RoleEnd(stream=branch.stream, op=op, line=line, role=role))

    def scope_begin(self, branch: Branch, name: str) -> None:
        with self.lock:
            op = self._next(branch)
            self.emit(ScopeBegin(stream=branch.stream, op=op, line=here(), name=name))

    def scope_end(self, branch: Branch, name: str) -> None:
        with self.lock:
            op = self._next(branch, name)
            self.emit(ScopeEnd(stream=branch.stream, op=op, line=here(), name=name))
            branch.names[name] = Made(op, branch, name)

    def sync(
        self,
        branch: Branch,
        want: Literal["nothing", "text", "messages"],
        line: str | None = None,
    ) -> int:
        """The op of a `Sync` that reports the branch as it is now (an earlier one if it holds)."""
        with self.lock:
            known = branch.messages_op if want == "messages" else branch.text_op
            if known >= 0 and (known > branch.last_op or branch.ended):
                return known
            line = here() if line is None else line
            self._check_open(branch, line)
            op = next(self.ops)
            self.emit(Sync(stream=branch.stream, op=op, line=line, want=want))
            if want == "text":
                branch.text_op = op
            elif want == "messages":
                branch.messages_op = op
            return op

    def final(self, branch: Branch) -> None:
        """Have a branch report its text and messages before it ends."""
        self.sync(branch, "text", "")
        if branch.uses_roles:
            self.sync(branch, "messages", "")

    # --- how --------------------------------------------------------------------------------------

    def _append(self, branch: Branch, value: Expression | str) -> None:
        if isinstance(value, str):
            line = here()
            parts = self.parts(value, line)
            if parts:
                op = self._next(branch)
                self.emit(Text(stream=branch.stream, op=op, line=line, parts=parts))
        elif isinstance(value, Concat):
            for item in value.items:
                self._append(branch, item)
        elif isinstance(value, RoleExpression):
            self._role(branch, value)
        elif isinstance(value, GenExpression):
            op = self._next(branch, value.name)
            self.emit(
                Gen(
                    stream=branch.stream,
                    op=op,
                    line=here(),
                    name=value.name,
                    sampling=value.sampling,
                )
            )
            many = value.sampling.get("n", 1) > 1
            branch.names[value.name] = Made(op, branch, value.name, value.type, True, many)
            self.labels[op] = value.name
        elif isinstance(value, SelectExpression):
            line = here()
            op = self._next(branch, value.name)
            self.emit(
                Select(
                    stream=branch.stream,
                    op=op,
                    line=line,
                    name=value.name,
                    choices=tuple(self.parts(choice, line) for choice in value.choices),
                    method=value.method,
                    boundary=value.boundary,
                    explain=value.explain,
                )
            )
            branch.names[value.name] = Made(op, branch, value.name, None, True)
            self.labels[op] = value.name
        else:
            raise ProgramError(f"cannot append {value!r}", where=here() or None)

    def _role(self, branch: Branch, value: RoleExpression) -> None:
        if value.part != "end":
            self.role_begin(branch, value.role)
        if value.body is not None:
            self._append(branch, value.body)
        if value.part != "begin":
            self.role_end(branch, value.role)

    def parts(self, text: str, line: str) -> Parts:
        """A text as literals, arguments and references of this program."""
        if not self.strict and is_plain(text):
            return (str(text),) if text else ()
        return tuple(
            part if ref is None else self._resolve(part, ref, line)
            for part, ref in pieces(text, strict=self.strict)
        )

    def _resolve(self, part: Part, ref: SymbolRef, line: str) -> Part:
        if ref.owner != self.owner:
            raise ProgramError(
                f"a reference to {ref.name!r} of another program cannot be appended",
                where=line or None,
            )
        return part if not isinstance(part, Ref) else self.refer(ref)

    def take(self, branch: Branch, name: str) -> SymbolRef:
        """What ``name`` of a branch means now, to be referred to later."""
        binding = branch.names.get(name)
        if binding is None:
            raise missing(branch, name)
        if isinstance(binding, Gathered) or (isinstance(binding, Made) and binding.many):
            samples = isinstance(binding, Made) and not binding.gathered
            hint = _OF_SAMPLES if samples else ""
            raise ProgramError(
                f"{name!r} is a list; it cannot be referred to as one text{hint}",
                where=here() or None,
            )
        self._taken.add((branch.stream, name, binding.op))
        return SymbolRef(self.owner, branch.stream, binding.op, name)

    def refer(self, ref: SymbolRef) -> Ref:
        """The `Ref` that means what ``ref`` meant when it was taken."""
        saved = self._saved.get((ref.stream, ref.name, ref.op))
        return Ref(ref.stream, ref.name if saved is None else saved)

    def _next(self, branch: Branch, binds: str | None = None) -> int:
        """The number of the branch's next instruction, which binds a name. What was taken of an
        earlier binding of that name is first saved under another one."""
        self._check_open(branch, "")
        old = branch.names.get(binds) if binds is not None else None
        if old is not None and binds is not None:
            self._rebind(branch, binds, old)
        branch.last_op = next(self.ops)
        return branch.last_op

    def _rebind(self, branch: Branch, name: str, old: Binding) -> None:
        """A name is about to mean something else."""
        if (branch.stream, name, old.op) in self._taken:
            self._save(branch, name, old)

    def _save(self, branch: Branch, name: str, old: Binding) -> str:
        """The other name of a binding, given to it now if it has none."""
        key = (branch.stream, name, old.op)
        if key not in self._saved:
            self._saved[key] = f"{name}@{old.op}"
            parts = (Ref(branch.stream, name),)
            bind = Bind(stream=branch.stream, op=next(self.ops), name=self._saved[key], parts=parts)
            self._emit_beside(branch, old.op, bind)
        return self._saved[key]

    def _emit_beside(self, branch: Branch, op: int, instruction: Instruction) -> None:
        """Emit in the block that holds instruction ``op``, or else the beginning of the branch."""
        del branch, op
        self.emit(instruction)

    def _check_open(self, branch: Branch, line: str) -> None:
        if self.closed:
            raise ProgramError("this program has ended", where=line or here() or None)
        if branch.ended:
            raise ProgramError("this branch has ended (joined)", where=line or here() or None)


def _own(child: Branch, name: str) -> Binding | None:
    """What the child itself bound to a name since it was forked."""
    binding = child.names.get(name)
    return binding if binding is not None and binding.branch is child else None


def _fresh(branch: Branch, children: list[Branch]) -> list[str]:
    """What a join gathers: names bound in a child that are not the parent's own; lists that an
    earlier join gathered are replaced."""
    names = {name: None for child in children for name in child.names if name is not None}
    return [
        name
        for name in names
        if _may_gather(branch.names.get(name)) and any(_own(child, name) for child in children)
    ]


def _may_gather(binding: Binding | None) -> bool:
    """Whether a join may bind a name that means this now."""
    if isinstance(binding, Made):
        return binding.gathered
    return binding is None or isinstance(binding, Gathered)


def missing(branch: Branch, name: str | None, but: str | None = None) -> MissingValueError:
    """The error for a name that a branch does not have (``but``: though it seemed it would)."""
    return MissingValueError(
        f"{name!r} was never generated; known here: {branch.known(but)}", where=here() or None
    )
