"""The seam between programs and whatever runs them: the engine, an OpenAI server, a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol, runtime_checkable

import msgspec

from ..protocol.meta import MetaInfo
from ..protocol.sampling import SamplingParams
from .instructions import ChoicesMethod


class GenResult(msgspec.Struct, frozen=True):
    """One finished sample."""

    text: str
    meta: MetaInfo


class SelectResult(msgspec.Struct, frozen=True):
    """The winner's index and how every choice scored."""

    index: int
    meta: MetaInfo


OnDelta = Callable[[str, MetaInfo | None], None]
"""Called with each piece of a generation's text (sample 0) as it comes; pieces join to the text."""


class Context(Protocol):
    """One stream's state inside an executor. Calls come one at a time, in program order.

    A context is owned by the interpreter, which calls `close` exactly once, also after an error.
    `gen` and `select` may be cancelled (asyncio): the work behind them must then be aborted.
    """

    def append(self, text: str) -> None:
        """Add literal text: content inside an open role, raw program text outside."""
        ...

    def role_begin(self, role: str) -> str:
        """Open a message; returns the marker text this adds to the stream's text ('' if none)."""
        ...

    def role_end(self, role: str) -> str:
        """Close the message; returns the marker text this adds."""
        ...

    def fork(self) -> Context:
        """A copy that shares everything so far and grows apart from here on."""
        ...

    async def gen(
        self, sampling: SamplingParams, name: str | None, on_delta: OnDelta | None
    ) -> list[GenResult]:
        """Generate ``sampling.n`` samples; the context continues with the first.

        Raises a `RametError` for a request that cannot be honoured.
        """
        ...

    async def select(
        self,
        choices: Sequence[str],
        method: ChoicesMethod,
        boundary: Literal["exact", "plain"],
        name: str | None,
    ) -> SelectResult:
        """Score the choices as continuations, append the winner."""
        ...

    async def warm(self) -> None:
        """Prefill what the context holds, generating nothing."""
        ...

    def warnings(self) -> list[tuple[str, str]]:
        """(name, message) of what should be told to the user since the last call."""
        ...

    def close(self) -> None:
        """Give back what the context holds. Idempotent."""
        ...


@runtime_checkable
class LooksAhead(Protocol):
    """A context that can use hints of what its program still does."""

    def expect(self, remaining: int, reads: bool) -> None:
        """Of the generation or selection that comes next: ``remaining`` are to come in the program
        after it, as far as it was sent; ``reads``: this stream, or one forked from it, may have
        one of them."""
        ...

    def rest(self) -> None:
        """Nothing will be generated or selected on this stream, nor on one forked from it later."""
        ...


class Following(msgspec.Struct, frozen=True):
    """A generation that comes after another: behind that one's output come ``texts``, appended one
    by one. ``remaining`` and ``reads`` are as in `LooksAhead.expect`."""

    texts: tuple[str, ...]
    sampling: SamplingParams
    remaining: int
    reads: bool


@runtime_checkable
class GoesOn(Protocol):
    """A context that can begin a generation as soon as the one before it has ended."""

    def announce(self, following: Sequence[Following]) -> None:
        """What the stream is to do after the generation that comes next, in order. It is told so
        again as usual, and may do something else if its program fails."""
        ...


@runtime_checkable
class Explains(Protocol):
    """A context that can say where a prompt left what was cached. (`Context.gen` is told by its
    sampling parameters.)"""

    def explain_next(self) -> None:
        """The meta info of the selection that comes next is to say it."""
        ...


class Executor(Protocol):
    """Makes contexts. One executor serves many programs at a time."""

    def open(self, program: int, cache_salt: str | None = None) -> Context:
        """A fresh, empty context for stream 0 of a program (``program`` is its number)."""
        ...
