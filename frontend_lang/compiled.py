"""Traced programs that can be run."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

from ramet.runtime.program.instructions import Program
from ramet.runtime.protocol import BadInputError, ProgramError

from . import batch
from .arguments import OF_RUNS, SAMPLING, Given, Item, checked_sampling
from .backends.base import Backend, Opening, default_backend
from .branch import Binding, Branch, Made
from .branch import Given as SetHere
from .forks import Forks
from .names import near
from .run import Run
from .state import State
from .symbols import Symbol, pieces
from .trace import Trace

if TYPE_CHECKING:
    from .function import Function


class CompiledRun(Run):
    """A run of a traced program: everything is sent at the start."""

    def __init__(
        self,
        trace: Trace,
        backend: Backend,
        opening: Opening,
        arguments: Mapping[str, Any],
        timeout: float | None,
    ) -> None:
        super().__init__(backend, opening, timeout)
        recording = trace.recording
        self.owner = recording.owner
        self.root = recording.root
        self.branches = recording.branches
        self.labels = recording.labels
        self.blocks = recording.blocks
        self.returned = trace.returned
        self.arguments = arguments
        self.closed = True
        self._sent = True
        self.session.send(trace.program.instructions, True)

    def read(self, branch: Branch, name: str | None, binding: Binding) -> Any:
        if isinstance(binding, SetHere) and isinstance(binding.value, Symbol):
            lineage = binding.branch.lineage(binding.op)
            return self.wait(lambda: self.store.value(binding.op, name, lineage)).value
        return super().read(branch, name, binding)

    def result(self) -> Any:
        return self._resolved(self.returned)

    def _resolved(self, value: Any) -> Any:
        if isinstance(value, Symbol):
            return "".join(self._text(part, ref) for part, ref in pieces(value))
        if isinstance(value, State):
            return value.of(self)
        if isinstance(value, Forks):
            states = [state.of(self) for state in cast("Forks[State]", value)]
            return Forks(states, lambda _, __: self.refuse())
        if isinstance(value, list):
            return [self._resolved(item) for item in cast("list[Any]", value)]
        if isinstance(value, tuple):
            return tuple(self._resolved(item) for item in cast("tuple[Any, ...]", value))
        if isinstance(value, dict):
            items = cast("dict[Any, Any]", value).items()
            return {key: self._resolved(item) for key, item in items}
        return value

    def refuse(self) -> NoReturn:
        """What an operation on a branch of this run leads to."""
        raise ProgramError("this program has ended")

    def _text(self, part: Any, ref: Any) -> str:
        if ref is None:
            return part
        if ref.op < 0:
            return str(self.arguments[ref.name])
        for branch in self.branches:
            for name, binding in branch.names.items():
                if (binding.op, name) == (ref.op, ref.name) and isinstance(binding, Made):
                    return str(self.made(binding).value)
        raise ProgramError(f"the value of {ref.name!r} was not kept")


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
        batch_arguments: Sequence[Given],
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
        chosen = default_backend(backend)
        start = functools.partial(self._begin, chosen, timeout, cache_salt)
        states = batch.run_all(self.function, items, start, chosen, num_threads, progress_bar)
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
        return CompiledRun(self.trace, backend, opening, arguments, timeout)

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

    def _split(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Item:
        names = self.function.parameters.sampling_names
        sampling = {k: v for k, v in kwargs.items() if k in names}
        own = {k: v for k, v in kwargs.items() if k not in sampling}
        return self._items([_positional(self.program.args, args, own)], sampling)[0]

    def _items(
        self,
        batch_arguments: Sequence[Given],
        sampling: Mapping[str, Any],
    ) -> list[Item]:
        wanted = self.program.args
        out: list[dict[str, Any]] = []
        for index, item in enumerate(batch_arguments):
            given = dict(item) if isinstance(item, Mapping) else _positional(wanted, item, {})
            missing = [name for name in wanted if name not in given]
            extra = [name for name in given if name not in wanted]
            if missing or extra:
                reasons = [f"missing a required argument: {name!r}" for name in missing[:1]]
                for name in extra[:1]:
                    hint = near(name, (*missing, *SAMPLING, *OF_RUNS))
                    reasons.append(
                        f"{name!r} was fixed when the program was compiled, or is unknown{hint}"
                    )
                what = "; ".join(reasons)
                raise BadInputError(
                    f"item {index}: given arguments mismatch the compiled program "
                    f"{self.program.name}({', '.join(wanted)}): {what}",
                    param=(missing or extra)[0],
                )
            out.append(given)
        clean = checked_sampling(sampling, "run()")
        return [(arguments, clean) for arguments in out]


def _positional(
    names: Sequence[str], args: Sequence[Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    if len(args) > len(names):
        raise BadInputError(f"{len(args)} arguments for a compiled program of {len(names)}")
    return {**dict(zip(names, args)), **given}
