"""The state ``s`` of a program: text grows with ``+=``, values are read with ``[]``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, Literal, cast

from ramet.runtime.program.limits import Limits
from ramet.runtime.protocol import (
    BackendError,
    BadInputError,
    MissingValueError,
    ProgramError,
    RametError,
)

from . import streaming
from .branch import Binding, Branch, Gathered, Given, Made
from .conditions import Matches, case_texts, check_match, value_text
from .expressions import Expression, check_name, checked
from .forks import Forks
from .recording import Recording, missing
from .run import Run
from .source import here
from .streaming import StreamEvent
from .symbols import reference

MOST_STREAMS = Limits().streams
"""Branches that one program may have."""
MOST_TURNS = Limits().turns
"""Turns that one loop may have."""
Arm = Callable[["State"], Any] | Expression | str
"""What a case or a loop does: a function of the state, or what is to be appended."""


class State:
    """One branch of a program, recorded or running.

    Appending returns at once; reading waits for what it needs. An error of the runtime is raised at
    every reader of what it prevented, with the source line of the instruction that failed.
    """

    __slots__ = ("_branch", "_parent", "_recording")

    def __init__(self, recording: Recording, branch: Branch, parent: State | None = None) -> None:
        self._recording = recording
        self._branch = branch
        self._parent = parent

    # --- growing ----------------------------------------------------------------------------------

    def __iadd__(self, value: Expression | str) -> State:
        self._recording.append(self._branch, checked(value))
        return self

    def __setitem__(self, name: str, value: Any) -> None:
        """Set a variable. It may be any object; the runtime sees it as ``str(value)``."""
        check_name(name)
        self._recording.set(self._branch, name, value)

    def fork(self, size: int = 1) -> Forks[State]:
        """``size`` branches that share everything so far and grow apart from here on."""
        if not isinstance(size, int) or not 1 <= size <= MOST_STREAMS:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BadInputError(
                f"fork needs a size of at least 1 and at most {MOST_STREAMS}, not {size!r}",
                param="size",
                where=here(),
            )
        children = self._recording.fork(self._branch, size)
        states = [State(self._recording, child, self) for child in children]
        return Forks(states, self._join)

    def copy(self) -> State:
        """A branch of its own; ``with s.copy() as c`` also joins it at the end."""
        return self.fork(1)[0]

    def __enter__(self) -> State:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._parent is not None:
            self._parent._join([self], "gather_variable")

    def var_scope(self, name: str) -> Scope:
        """``with s.var_scope("x")``: ``x`` is bound to the text produced inside."""
        check_name(name)
        recording, branch = self._recording, self._branch
        return Scope(
            lambda: recording.scope_begin(branch, name), lambda: recording.scope_end(branch, name)
        )

    def system(self, expr: Expression | str | None = None) -> Scope:
        """A system message: ``s.system("…")``, or ``with s.system():``."""
        return self._role("system", expr)

    def user(self, expr: Expression | str | None = None) -> Scope:
        """A user message: ``s.user("…")``, or ``with s.user():``."""
        return self._role("user", expr)

    def assistant(self, expr: Expression | str | None = None) -> Scope:
        """An assistant message: ``s.assistant(…)``, or ``with s.assistant():``."""
        return self._role("assistant", expr)

    def switch(
        self,
        value: Any,
        cases: Mapping[Any, Arm],
        default: Arm | None = None,
        *,
        match: Literal["strip", "exact", "contains"] = "strip",
    ) -> None:
        """Go on as the first case says whose text ``value`` matches, else as ``default`` does: call
        it with this state, or append it. Blanks at both ends count only with ``match="exact"``;
        with "contains" the text may stand anywhere in the value. What an arm binds stays bound.

        Compiled, ``value`` may be one that is not known yet, and every arm is recorded."""
        check_match(match)
        arms = {text: self._arm(arm) for text, arm in case_texts(cases).items()}
        other = self._arm(default) if default is not None else lambda: None
        self._recording.switch(self._branch, value_text(value), arms, other, match)

    def repeat(
        self,
        body: Arm,
        times: int,
        *,
        until: Callable[[State], Matches | bool] | None = None,
        count: str | None = None,
    ) -> None:
        """Call ``body`` with this state (or append it) up to ``times`` times: until, after one of
        them, ``until(s)`` is true. ``count`` names a variable that holds the turn's number, from
        "1", and afterwards how many there were.

        Compiled, the body is recorded once, ``until`` must be made with `matches`, and a variable
        that was there before means in the body what it does as each turn begins."""
        if isinstance(times, bool) or not isinstance(times, int) or not 1 <= times <= MOST_TURNS:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BadInputError(
                f"times must be a whole number from 1 to {MOST_TURNS}, not {times!r}",
                param="times",
                where=here() or None,
            )
        if until is not None and not callable(until):
            raise BadInputError(
                f"until must be a function of the state, such as lambda s: ..., not {until!r}",
                param="until",
                where=here() or None,
            )
        if count is not None:
            check_name(count)
        over = None if until is None else lambda: until(self)
        self._recording.repeat(self._branch, self._arm(body), times, over, count)

    # --- reading ----------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        """The variable's text, waited for; a list for n > 1 and for what `join` gathered."""
        return self._recording.read(self._branch, name, self._binding(name))

    def __contains__(self, name: object) -> bool:
        """Whether the variable is there, waiting for it while it is pending."""
        run = self._recording
        if isinstance(run, Run):
            run.wait_for_function(cast("str", name), self._branch)
        binding = self._branch.names.get(cast("str", name))
        if binding is None:
            return False
        try:
            self._recording.read(self._branch, cast("str", name), binding)
        except MissingValueError:  # of an arm that was not taken
            return False
        return True

    def get(self, name: str, default: Any = None) -> Any:
        """The variable's value, or ``default`` for a name that the program does not have."""
        return self[name] if name in self else default  # noqa: SIM401 - this is that method

    def value(self, name: str) -> Any:
        """The variable as a value of what it was constrained to: its ``dtype``, the JSON of a dict
        schema, an instance of a class given as schema; else its text. Raises `ProgramError` for
        text that is no such value, because it was cut."""
        return self._typed(name, self._binding(name), self[name])

    def ref(self, name: str) -> str:
        """A reference to the variable's text that the runtime resolves: append or concatenate it
        without waiting."""
        return reference(self._recording.take(self._branch, name))

    def text(self) -> str:
        """The whole text, the chat template's markers included, once all of it is there."""
        run = self._complete("text()")
        return run.reply(self._branch, run.sync(self._branch, "text")).text or ""

    def messages(self) -> list[dict[str, str]]:
        """The chat messages so far: ``[{"role": …, "content": …}]``."""
        run = self._complete("messages()")
        if not self._branch.uses_roles:
            return []
        return run.reply(self._branch, run.sync(self._branch, "messages")).messages or []

    def sync(self) -> None:
        """Wait until everything so far has run. Raises what failed."""
        run = self._complete("sync()")
        run.reply(self._branch, run.sync(self._branch, "text"))

    def error(self) -> BaseException | None:
        """Wait until everything so far has run, or the program is over; what failed, or None."""
        run = self._complete("error()")
        if run.failure is not None:
            return run.failure
        if run.closed:
            run.wait(run.over)
        else:
            try:
                self.sync()
            except RametError as error:
                return error
        return run.failure or run.errors(self._branch)

    def history(self, name: str) -> list[Any]:
        """All values that the variable has had on this branch, in order, once all so far has run:
        one a turn, say, of the loop that binds it."""
        self.sync()
        run = self._run("history()")
        return run.store.history(self._branch.stream, name, run.blocks)

    def get_meta_info(self, name: str, timeout: float | None = None) -> Any:
        """What is known about the variable's generation: a dict (a list where the value is one)."""
        binding = self._binding(name)
        return self._run("get_meta_info()").meta(binding, timeout)

    @property
    def ret_value(self) -> Any:
        """What the function returned; waits for the function if it still runs."""
        run = self._run("ret_value")
        run.store.wait(lambda: True if run.closed else None)
        if run.failure is not None:
            raise run.failure
        return run.result()

    def text_iter(self, var: str | None = None, *, var_name: str | None = None) -> Iterator[str]:
        """The text (or one variable's) in pieces as they come; the pieces join to the whole.
        Without ``stream=True`` there is one piece. Of a generation with ``n`` > 1 it is the first
        sample, with which the text goes on. ``var_name`` is SGLang's name for ``var``."""
        return streaming.text_iter(self._run("text_iter()"), self._branch, var or var_name)

    def text_async_iter(
        self,
        var: str | None = None,
        return_meta_data: bool = False,
        *,
        var_name: str | None = None,
    ) -> AsyncIterator[Any]:
        """As `text_iter`, for asyncio; with ``return_meta_data`` yields (piece, meta info), where
        lists of log-probs hold just the piece's tokens."""
        run = self._run("text_async_iter()")
        return streaming.text_async_iter(run, self._branch, var or var_name, return_meta_data)

    def events(self) -> Iterator[StreamEvent]:
        """The deltas of all branches as they come: (path of the branch, variable, delta)."""
        return streaming.events(self._run("events()"))

    async def async_events(self) -> AsyncIterator[StreamEvent]:
        """As `events`, for asyncio."""
        async for event in streaming.async_events(self._run("events()")):
            yield event

    def cancel(self) -> None:
        """Abort the whole program. Values that have come stay readable."""
        self._run("cancel()").abort()

    def __repr__(self) -> str:
        return f"<State {self._branch.path}, variables: {self._branch.known()}>"

    def of(self, recording: Recording) -> State:
        """The same branch in a run of the program that it was recorded for."""
        return State(recording, self._branch)

    # --- how --------------------------------------------------------------------------------------

    def _arm(self, arm: Arm) -> Callable[[], None]:
        """What a case or a body does with this state."""
        if not callable(arm):
            expression = checked(arm)
            return lambda: self._recording.append(self._branch, expression)

        def call() -> None:
            made: object = arm(self)
            if isinstance(made, Expression):
                raise BadInputError(
                    f"an arm or a body returned {made!r}; it must append it: s += ...",
                    where=here() or None,
                )

        return call

    def _join(self, states: list[State], mode: Any) -> None:
        if mode not in ("gather_variable", "concate_and_append"):
            raise ProgramError(
                f"join mode must be 'gather_variable' or 'concate_and_append', not {mode!r}",
                where=here(),
            )
        self._recording.join(self._branch, [state._branch for state in states], mode)

    def _role(self, role: str, expr: Expression | str | None) -> Scope:
        recording, branch = self._recording, self._branch
        scope = Scope(
            lambda: recording.role_begin(branch, role), lambda: recording.role_end(branch, role)
        )
        if expr is not None:
            with scope:
                recording.append(branch, checked(expr))
        return scope

    def _binding(self, name: str) -> Binding:
        run = self._recording
        if isinstance(run, Run):
            run.wait_for_function(name, self._branch)
        binding = self._branch.names.get(name)
        if binding is None:
            if isinstance(run, Run) and (run.failure is not None or run.store.fatal is not None):
                raise run.failure or cast("Any", run.store.fatal).exception()
            raise missing(self._branch, name)
        return binding

    def _typed(self, name: str, binding: Binding | None, value: Any) -> Any:
        if isinstance(binding, Gathered):
            return [self._typed(name, b, v) for b, v in zip(binding.items, value)]
        if binding is None or isinstance(binding, Given) or binding.type is None:
            return value
        if isinstance(value, list):
            samples = enumerate(cast("list[Any]", value))
            return [self._parsed(name, binding, item, index) for index, item in samples]
        return self._parsed(name, binding, value)

    def _parsed(self, name: str, binding: Made, text: str, sample: int | None = None) -> Any:
        assert binding.type is not None
        try:
            return binding.type.parse(text)
        except ValueError as error:
            meta = self._run("value()").meta(binding)
            what = f"{name!r} is no {binding.type.name}: {text!r}{_cut(meta, sample)}"
            raise ProgramError(what) from error

    def _complete(self, what: str) -> Run:
        """The run, once the function has returned (or at once, inside of it)."""
        run = self._run(what)
        run.wait_for_function()
        return run

    def _run(self, what: str) -> Run:
        if isinstance(self._recording, Run):
            return self._recording
        raise ProgramError(f"{what} is not known while a program is compiled", where=here() or None)


def _cut(meta: Any, sample: int | None) -> str:
    """What to say of a text that ends early, by the meta info of its generation."""
    if isinstance(meta, list) and sample is not None:
        meta = cast("list[Any]", meta)[sample]
    if not isinstance(meta, dict):
        return ""
    known = cast("dict[str, Any]", meta)
    reason: Any = known.get("finish_reason")
    if not reason or reason["type"] != "length":
        return ""
    tokens = known["completion_tokens"]
    return f"; it was cut after {tokens} tokens (finish reason length): raise max_tokens"


class Scope:
    """A ``with`` block of a state. The end is recorded also when the body raises, so that a program
    whose function catches the error goes on with its messages closed."""

    __slots__ = ("_begin", "_end")

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._begin = begin
        self._end = end

    def __enter__(self) -> None:
        self._begin()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self._end()
        except (ProgramError, BackendError):
            if error is None:  # else the body's own error says more
                raise
