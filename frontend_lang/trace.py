"""A function called with symbols: its instructions as data, without running any."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ramet.runtime.program.instructions import (
    Instruction,
    Program,
    RoleBegin,
    RoleEnd,
    Text,
    Warm,
)

from .backends.base import Backend, Opening
from .listing import listing
from .recording import Recording
from .run import Run
from .state import State
from .tracing import Tracing

if TYPE_CHECKING:
    from .function import Function


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
    for name, parameter in function.parameters.signature.parameters.items():
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
    trace = trace_function(function, function.parameters.bound, cut=True)
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
