"""Programs as data: a function traced with symbols, and its runs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from ramet.runtime.program.instructions import (
    Fork,
    Instruction,
    Program,
    RoleBegin,
    RoleEnd,
    Text,
    Warm,
)
from ramet.runtime.protocol import BadInputError, ErrorInfo, ProgramError

from . import batch
from .backends.base import Backend, Opening, default_backend
from .branch import Binding, Branch, Gathered, Given, Made
from .listing import listing
from .recording import Recording
from .run import Run
from .state import State
from .symbols import Symbol, argument, pieces, reference

if TYPE_CHECKING:
    from .function import Function


class Tracing(Recording):
    """A recording that only keeps its instructions; values are symbols."""

    strict = True

    def __init__(self) -> None:
        super().__init__()
        self.instructions: list[Instruction] = []
        self.arguments: dict[str, None] = {}
        self.inlined: list[Branch] = []

    def emit(self, instruction: Instruction) -> None:
        self.instructions.append(instruction)

    def read(self, branch: Branch, name: str | None, binding: Binding) -> Any:
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


@dataclass(frozen=True, slots=True)
class Trace:
    """A traced function: its `Program`, and what is known of its branches. Prints as a listing."""

    program: Program
    recording: Tracing
    returned: Any = None

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        """The program's instructions, in program order."""
        return self.program.instructions

    def __str__(self) -> str:
        return listing(self.program)


def trace_function(function: Function, fixed: Mapping[str, Any], *, cut: bool = False) -> Trace:
    """Call the function with ``fixed`` arguments, defaults, and symbols for the rest.

    With ``cut``, what was recorded before the function needed a value is a trace too.
    """
    tracing = Tracing()
    arguments: dict[str, Any] = {}
    for name, parameter in function.signature.parameters.items():
        if name in fixed:
            arguments[name] = fixed[name]
        elif parameter.kind in (
            inspect.Parameter.VAR_KEYWORD,
            inspect.Parameter.VAR_POSITIONAL,
        ):
            continue
        elif parameter.default is inspect.Parameter.empty:
            arguments[name] = tracing.argument(name)
    arguments.update({k: v for k, v in fixed.items() if k not in arguments})
    returned = None
    try:
        returned = function.record(tracing, State(tracing, tracing.root), arguments)
        tracing.close()
    except Exception:
        if not cut:
            raise
    return Trace(tracing.program(function.name), tracing, returned)


def inline(recording: Recording, function: Function, arguments: dict[str, Any]) -> State:
    """A call of one program inside another that is being traced: a branch that starts empty."""
    assert isinstance(recording, Tracing)
    state = State(recording, recording.fresh())
    function.record(recording, state, arguments)
    return state


def warm(function: Function, backend: Backend) -> None:
    """Prefill the program's beginning that does not depend on arguments or values."""
    trace = trace_function(function, function.bound, cut=True)
    prefix: list[Instruction] = []
    for instruction in trace.instructions:
        if instruction.stream != 0 or not isinstance(instruction, (Text, RoleBegin, RoleEnd)):
            break
        if isinstance(instruction, Text):
            constant = _constant(instruction)
            if constant is not instruction:
                prefix.extend([constant] if constant.parts else [])
                break
        prefix.append(instruction)
    if not prefix:
        return
    run = Run(backend, Opening(function.name))
    run.session.send([*prefix, Warm(op=1 + max(i.op for i in prefix))], True)
    run.settle()
    error = run.errors(run.root)
    if error is not None:
        raise error


def _constant(text: Text) -> Text:
    """The literals that a text begins with; the text itself when it is all literal."""
    for index, part in enumerate(text.parts):
        if not isinstance(part, str):
            return Text(stream=text.stream, op=text.op, line=text.line, parts=text.parts[:index])
    return text


class CompiledRun(Run):
    """A run of a traced program: everything is sent at the start."""

    def __init__(
        self, trace: Trace, backend: Backend, opening: Opening, timeout: float | None
    ) -> None:
        super().__init__(backend, opening, timeout)
        recording = trace.recording
        self.owner = recording.owner
        self.root = recording.root
        self.branches = recording.branches
        self.labels = recording.labels
        self.returned = trace.returned
        self.closed = True
        self._sent = True
        self.session.send(trace.program.instructions, True)

    def result(self) -> Any:
        return self._resolved(self.returned)

    def _resolved(self, value: Any) -> Any:
        if isinstance(value, Symbol):
            return "".join(self._text(part, ref) for part, ref in pieces(value))
        if isinstance(value, list):
            return [self._resolved(item) for item in cast("list[Any]", value)]
        if isinstance(value, tuple):
            return tuple(self._resolved(item) for item in cast("tuple[Any, ...]", value))
        if isinstance(value, dict):
            items = cast("dict[Any, Any]", value).items()
            return {key: self._resolved(item) for key, item in items}
        return value

    def _text(self, part: Any, ref: Any) -> str:
        if ref is None:
            return part
        if ref.op < 0:
            return str(self.arguments[ref.name])
        for branch in self.branches:
            for binding in branch.names.values():
                if binding.op == ref.op and isinstance(binding, Made):
                    return str(self.made(binding).value)
        raise ProgramError(f"the value of {ref.name!r} was not kept")

    @property
    def arguments(self) -> Mapping[str, Any]:
        return self._arguments

    _arguments: Mapping[str, Any] = {}

    def given(self, arguments: Mapping[str, Any]) -> CompiledRun:
        self._arguments = arguments
        return self


class Compiled:
    """A program traced once. Runs send it whole; a batch sends it once and then only arguments."""

    def __init__(self, function: Function, trace: Trace) -> None:
        self.function = function
        self.trace = trace

    @property
    def program(self) -> Program:
        """The program as data."""
        return self.trace.program

    def __str__(self) -> str:
        return str(self.trace)

    def run(
        self,
        *args: Any,
        backend: Backend | None = None,
        stream: bool = False,
        timeout: float | None = None,
        cache_salt: str | None = None,
        **kwargs: Any,
    ) -> State:
        """As `Function.run`."""
        arguments, sampling = self._split(args, kwargs)
        opening = Opening(self.program.name, {}, sampling, stream, cache_salt)
        run = self.start(default_backend(backend), arguments, opening, timeout)
        if not stream:
            self.function.finish(run, {})
        return State(run, run.root)

    async def arun(
        self,
        *args: Any,
        backend: Backend | None = None,
        stream: bool = False,
        timeout: float | None = None,
        cache_salt: str | None = None,
        **kwargs: Any,
    ) -> State:
        """As `Function.arun`."""
        arguments, sampling = self._split(args, kwargs)
        opening = Opening(self.program.name, {}, sampling, stream, cache_salt)
        run = self.start(default_backend(backend), arguments, opening, timeout)
        if not stream:
            await batch.settled(run)
        return State(run, run.root)

    def run_batch(
        self,
        batch_arguments: Sequence[Mapping[str, Any] | Sequence[Any]],
        *,
        backend: Backend | None = None,
        progress_bar: bool = False,
        generator_style: bool = False,
        num_threads: int | Literal["auto"] = "auto",
        timeout: float | None = None,
        cache_salt: str | None = None,
        **sampling: Any,
    ) -> list[State] | Iterator[State]:
        """As `Function.run_batch`."""
        items = self._items(batch_arguments, sampling)
        start = functools.partial(self._begin, default_backend(backend), timeout, cache_salt)
        states = batch.run_all(self.function, items, start, num_threads, progress_bar)
        return states if generator_style else list(states)

    def start(
        self,
        backend: Backend,
        arguments: dict[str, Any],
        opening: Opening,
        timeout: float | None = None,
    ) -> CompiledRun:
        """A run that has been sent."""
        backend.register(self.program)
        texts = {name: str(value) for name, value in arguments.items()}
        opening = replace(opening, args=texts, registered=self.program)
        return CompiledRun(self.trace, backend, opening, timeout).given(arguments)

    def _begin(
        self,
        backend: Backend,
        timeout: float | None,
        cache_salt: str | None,
        arguments: dict[str, Any],
        sampling: dict[str, Any],
    ) -> CompiledRun:
        opening = Opening(self.program.name, {}, sampling, False, cache_salt)
        return self.start(backend, arguments, opening, timeout)

    def _split(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        names = self.function.sampling_names
        sampling = {k: v for k, v in kwargs.items() if k in names}
        own = {k: v for k, v in kwargs.items() if k not in sampling}
        return self._items([_positional(self.program.args, args, own)], sampling)[0]

    def _items(
        self,
        batch_arguments: Sequence[Mapping[str, Any] | Sequence[Any]],
        sampling: Mapping[str, Any],
    ) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        wanted = self.program.args
        out: list[dict[str, Any]] = []
        for index, item in enumerate(batch_arguments):
            given = dict(item) if isinstance(item, Mapping) else _positional(wanted, item, {})
            missing = [name for name in wanted if name not in given]
            extra = [name for name in given if name not in wanted]
            if missing or extra:
                what = f"missing a required argument: {missing[0]!r}"
                if extra:
                    what = f"{extra[0]!r} was fixed when the program was compiled, or is unknown"
                raise BadInputError(
                    f"item {index}: given arguments mismatch the compiled program "
                    f"{self.program.name}({', '.join(wanted)}): {what}",
                    param=(missing or extra)[0],
                )
            out.append(given)
        checked = self.function.items([], sampling)
        del checked
        clean = {k: v for k, v in sampling.items() if v is not None}
        return [(arguments, clean) for arguments in out]


def _positional(
    names: Sequence[str], args: Sequence[Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    if len(args) > len(names):
        raise BadInputError(f"{len(args)} arguments for a compiled program of {len(names)}")
    return {**dict(zip(names, args)), **given}


def cancelled() -> ErrorInfo:
    """What readers get when the user cancels."""
    return ErrorInfo("aborted", "the program was cancelled")
