"""``@function``: a Python function whose first parameter is the state of a prompt program."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, overload

from ramet.runtime.protocol import ProgramError

from . import batch
from .arguments import Given, Parameters
from .backends.base import Backend, Opening, default_backend
from .compiled import Compiled
from .recording import Recording
from .run import Run
from .state import State
from .trace import Trace, inline, trace_function, warm

_current: contextvars.ContextVar[Recording | None] = contextvars.ContextVar(
    "ramet_recording", default=None
)


class Function:
    """A prompt program. `run` it, `run_batch` it, or `compile` it; calling it inside another
    program runs it as a program of its own."""

    def __init__(
        self,
        body: Callable[..., Any],
        bound: Mapping[str, Any] | None = None,
        compiles: bool = False,
    ) -> None:
        self.body = body
        self.compiles = compiles
        self._compiled: dict[str, Compiled] = {}
        self._compiling = threading.RLock()
        functools.update_wrapper(self, body)
        parameters = _parameters(body)
        signature = inspect.Signature(parameters[1:])
        self.parameters = Parameters(self.name, signature, dict(bound or {}))

    @property
    def name(self) -> str:
        """The Python function's name."""
        return getattr(self.body, "__name__", "program")

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by parameter, the bound ones among them. Raises `BadInputError`."""
        return self.parameters.arguments(args, kwargs)

    # --- running ----------------------------------------------------------------------------------

    def run(
        self,
        *args: Any,
        backend: Backend | None = None,
        stream: bool = False,
        timeout: float | None = None,
        cache_salt: str | None = None,
        **kwargs: Any,
    ) -> State:
        """Run the program and return its state once it has ended; with ``stream``, at once.

        Keywords that name sampling parameters (``temperature``, ``max_new_tokens``, …) are the
        defaults of every `gen`; the others are the function's arguments. An error that the runtime
        reports is raised where the state is read. Raises what the function raises, `BadInputError`
        for bad arguments, `BackendError` after ``timeout`` seconds; then, and on Ctrl-C, what was
        sent is aborted.
        """
        arguments, sampling = self.parameters.split(args, kwargs)
        chosen = self._backend(backend)
        run = self.start(chosen, arguments, sampling, stream, timeout, cache_salt)
        if stream:
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(self._drive_quietly, run, arguments),
                name=f"ramet-{self.name}",
                daemon=True,
            ).start()
            return State(run, run.root)
        return self.finish(run, arguments)

    async def arun(
        self,
        *args: Any,
        backend: Backend | None = None,
        stream: bool = False,
        timeout: float | None = None,
        cache_salt: str | None = None,
        **kwargs: Any,
    ) -> State:
        """As `run`, without holding up the event loop: the function runs in a thread. A cancelled
        wait aborts the program."""
        arguments, sampling = self.parameters.split(args, kwargs)
        chosen = self._backend(backend)
        run = self.start(chosen, arguments, sampling, stream, timeout, cache_salt)
        if stream:
            batch.spawn(self._drive_quietly, run, arguments)
            return State(run, run.root)
        try:
            if not run.closed:
                await asyncio.wrap_future(batch.spawn(self.drive, run, arguments))
            await run.settle_async()
        except asyncio.CancelledError:
            run.abort()
            raise
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
        """One run for each set of arguments (dicts, or tuples in the order of the parameters), many
        at a time; states in the order of the arguments. With ``generator_style`` they are yielded,
        in order, as they are ready. ``timeout`` is for each.

        Raises as `run`, with a note that tells the item; but an error of the runtime costs only its
        own item: it is raised where that item's state is read.
        """
        items = self.parameters.items(batch_arguments, sampling)
        chosen = self._backend(backend)
        start = functools.partial(self.start, chosen, timeout=timeout, cache_salt=cache_salt)
        states = batch.run_all(self, items, start, chosen, num_threads, progress_bar)
        return states if generator_style else list(states)

    async def arun_batch(
        self,
        batch_arguments: Sequence[Given],
        *,
        backend: Backend | None = None,
        num_threads: int | Literal["auto"] = "auto",
        timeout: float | None = None,
        cache_salt: str | None = None,
        **sampling: Any,
    ) -> list[State]:
        """As `run_batch`, for asyncio."""
        items = self.parameters.items(batch_arguments, sampling)
        chosen = self._backend(backend)
        start = functools.partial(self.start, chosen, timeout=timeout, cache_salt=cache_salt)
        return await batch.run_all_async(self, items, start, chosen, num_threads)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Inside a program: run as a program of its own on the same backend, with the same default
        sampling and salt; while compiling: be a branch of the compiled program; with a state as
        first argument: go on in that state."""
        if args and isinstance(args[0], State):
            return self.body(*args, **{**self.parameters.bound, **kwargs})
        current = _current.get()
        if current is not None and not isinstance(current, Run):
            return inline(current, self, self.parameters.split(args, kwargs)[0])
        if isinstance(current, Run):
            opening = current.opening
            names = self.parameters.sampling_names
            sampling = {k: v for k, v in opening.sampling.items() if k in names}
            kwargs = {**sampling, **kwargs}
            kwargs.setdefault("backend", current.backend)
            kwargs.setdefault("cache_salt", opening.cache_salt)
        return self.run(*args, **kwargs)

    # --- as data ----------------------------------------------------------------------------------

    def bind(self, **kwargs: Any) -> Function:
        """The same function with some arguments fixed."""
        self.parameters.check_known(kwargs)
        return Function(self.body, {**self.parameters.bound, **kwargs}, self.compiles)

    def trace(self, **kwargs: Any) -> Trace:
        """The instructions that the function records; arguments that are not given (or bound) stay
        symbols. Raises `ProgramError` where the function needs their value."""
        return trace_function(self, {**self.parameters.bound, **kwargs})

    def compile(self, **kwargs: Any) -> Compiled:
        """The whole program as data: ``.run`` and ``.run_batch`` send it at once, with no round
        trips. Arguments given here, and defaults, become constants."""
        return Compiled(self, self.trace(**kwargs))

    def cache(self, backend: Backend | None = None) -> None:
        """Have the backend prefill what the program begins with, whatever its arguments are."""
        warm(self, default_backend(backend))

    # --- pieces that batches use too --------------------------------------------------------------

    def start(
        self,
        backend: Backend,
        arguments: dict[str, Any],
        sampling: dict[str, Any],
        stream: bool = False,
        timeout: float | None = None,
        cache_salt: str | None = None,
    ) -> Run:
        """A run that has begun: of the compiled program it is all sent."""
        opening = Opening(self.name, {}, sampling, stream, cache_salt)
        if self.compiles:
            compiled, rest = self._specialize(arguments)
            return compiled.start(backend, rest, opening, timeout)
        return Run(backend, opening, timeout)

    def drive(self, run: Run, arguments: dict[str, Any]) -> None:
        """Run the Python function, and send what it left unsent."""
        if run.closed:
            return
        token = _current.set(run)
        run.driver = threading.get_ident()
        try:
            run.returned = self.body(State(run, run.root), **arguments)
            run.finish()
        except BaseException as error:
            run.fail(error)
            raise
        finally:
            _current.reset(token)

    def finish(self, run: Run, arguments: dict[str, Any]) -> State:
        """`drive`, then wait for the end."""
        try:
            self.drive(run, arguments)
            run.settle()
        except BaseException as error:
            if not run.store.done:
                run.fail(error)
            raise
        return State(run, run.root)

    def record(self, recording: Recording, state: State, arguments: dict[str, Any]) -> Any:
        """Call the function for the instructions it makes."""
        token = _current.set(recording)
        try:
            return self.body(state, **arguments)
        finally:
            _current.reset(token)

    # --- how --------------------------------------------------------------------------------------

    def _drive_quietly(self, run: Run, arguments: dict[str, Any]) -> None:
        with contextlib.suppress(Exception):  # it is in run.failure, which every reader raises
            self.drive(run, arguments)

    def _backend(self, backend: Backend | None) -> Backend:
        current = _current.get()
        if backend is None and isinstance(current, Run):
            return current.backend
        return default_backend(backend)

    def _specialize(self, arguments: dict[str, Any]) -> tuple[Compiled, dict[str, Any]]:
        """The compiled program for the parameters with defaults as they are given here."""
        parameters = self.parameters.signature.parameters
        fixed = {
            name: value
            for name, value in arguments.items()
            if name in self.parameters.bound
            or name not in parameters
            or parameters[name].default is not inspect.Parameter.empty
        }
        key = repr(sorted(fixed.items()))
        with self._compiling:  # the threads of a batch all come here at once
            if key not in self._compiled:
                self._compiled[key] = self.compile(**fixed)
        return self._compiled[key], {k: v for k, v in arguments.items() if k not in fixed}


def _parameters(body: Callable[..., Any]) -> list[inspect.Parameter]:
    """The function's parameters. Raises `ProgramError` for what cannot be a prompt program."""
    code = getattr(body, "__code__", None)
    where = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else None
    name = getattr(body, "__name__", "the function")
    parameters = list(inspect.signature(body).parameters.values())
    if not parameters or parameters[0].name != "s":
        got = f"it is {parameters[0].name!r}" if parameters else "it takes none"
        raise ProgramError(f"the first parameter of {name} must be 's'; {got}", where=where)
    if inspect.iscoroutinefunction(body) or inspect.isasyncgenfunction(body):
        raise ProgramError(
            f"{name} must be a plain function; `arun` runs it without holding up the loop",
            where=where,
        )
    if inspect.isgeneratorfunction(body):
        raise ProgramError(f"{name} must not yield; stream=True gives pieces", where=where)
    return parameters


@overload
def function(body: Callable[..., Any], /) -> Function: ...
@overload
def function(*, compile: bool = False) -> Callable[[Callable[..., Any]], Function]: ...
def function(
    body: Callable[..., Any] | None = None,
    /,
    *,
    compile: bool = False,  # noqa: A002
) -> Function | Callable[[Callable[..., Any]], Function]:
    """Make a prompt program of a function whose first parameter is ``s``. With ``compile`` it is
    traced at its first run and sent as one message from then on."""
    if body is not None:
        return Function(body, compiles=compile)

    def decorate(body: Callable[..., Any]) -> Function:
        return Function(body, compiles=compile)

    return decorate
