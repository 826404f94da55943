"""Requests whose output must match something: their grammars while those are compiled, and where
each output is in its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Protocol

from ..grammar.matcher import Grammar, Matcher
from ..grammar.spec import Spec
from ..protocol.errors import GrammarError, RametError
from ..protocol.sampling import Constraint
from ..scheduler.batch import IntArray
from ..scheduler.building import Planned
from ..scheduler.request import Request
from ..scheduler.rows import Rows
from .filling import ANYTHING, Failures, Job, MaskFiller

log = logging.getLogger(__name__)

APART = frozenset({"llguidance"})
"""Backends whose matchers share nothing and let other threads run while they fill a mask."""


class Pending(Protocol):
    """A grammar that is being compiled."""

    def done(self) -> bool: ...

    def result(self) -> Grammar:
        """Raises the `RametError` with which it failed."""
        ...

    def cancel(self) -> None:
        """Who asked does not want it any more."""
        ...


class Compiler(Protocol):
    """Compiles specs out of the way of whoever asks."""

    def submit(self, spec: Spec) -> Pending: ...

    def close(self) -> None: ...


class Guide:
    """One output in its grammar. With ``after``, whatever comes up to that text is free.

    What the library behind a matcher raises is a `GrammarError` here: it fails one request.
    """

    def __init__(
        self,
        matcher: Matcher,
        ends: Collection[int],
        after: bytes = b"",
        names: Mapping[int, bytes] | None = None,
        *,
        apart: bool = False,
    ) -> None:
        self._matcher = matcher
        self.apart = apart
        self._ends = ends
        self._names = names or {}
        self.ended = False
        """Whether the last token was one that ends an answer, and no text."""
        self._after = after
        self._tail = b""

    def fill(self, row: IntArray) -> None:
        """Write the tokens allowed next. Raises `GrammarError` when there are none."""
        if self._after:
            row.fill(ANYTHING)
            return
        try:
            self._matcher.fill(row)
        except Exception as error:
            raise _own(error) from error

    def accept(self, token: int, data: bytes) -> None:
        """Go on by a token, whose bytes are ``data``. Raises `GrammarError`."""
        if self._after:
            data = data or self._names.get(token, b"")
            self._tail = (self._tail + data)[-len(self._after) - len(data) :]
            if self._after in self._tail:
                self._after = b""
            return
        try:
            taken = self._matcher.accept(token)
        except Exception as error:
            raise _own(error) from error
        if not taken:
            raise GrammarError(f"the grammar does not go on with token {token}")
        self.ended = token in self._ends

    @property
    def done(self) -> bool:
        """Whether nothing more can come. Raises `GrammarError`."""
        try:
            return not self._after and self._matcher.is_done()
        except Exception as error:
            raise _own(error) from error

    def forced(self, recent: Sequence[int]) -> list[int]:
        """Tokens that must come next, to be accepted one by one. ``recent``: what came before.
        Raises `GrammarError`."""
        try:
            return [] if self._after else self._matcher.forced_tokens(recent)
        except Exception as error:
            raise _own(error) from error


@lru_cache(maxsize=64)
def _spec_of(constraint: Constraint) -> Spec:
    """Remembered, as its key takes a while to make of a long one."""
    return Spec.of(constraint.kind, constraint.spec, constraint.whitespace)


def _own(error: Exception) -> GrammarError:
    if isinstance(error, GrammarError):
        return error
    log.error("a grammar's library failed", exc_info=error)
    return GrammarError(f"the grammar's library failed: {type(error).__name__}")


class Guides:
    """Guides of the engine's requests, by request. ``compiler`` is made when it is first needed;
    ``ends`` are the ids that end an answer, ``names`` what tokens without text are called."""

    def __init__(
        self,
        compiler: Callable[[], Compiler],
        ends: Collection[int],
        names: Mapping[int, bytes] | None = None,
    ) -> None:
        self._make = compiler
        self._names = names or {}
        self._ends = frozenset(ends)
        self._compiler: Compiler | None = None
        self._filler = MaskFiller()
        self._pending: dict[int, tuple[Request, Pending]] = {}
        self._guides: dict[int, Guide] = {}

    def __getitem__(self, request: Request) -> Guide:
        return self._guides[request.serial]

    @property
    def waiting(self) -> bool:
        """Whether some grammar is being compiled."""
        return bool(self._pending)

    def start(self, request: Request, constraint: Constraint) -> None:
        """Have the request's grammar compiled; `ready` tells when it is. Raises `RametError`."""
        if self._compiler is None:
            self._compiler = self._make()
        self._pending[request.serial] = (request, self._compiler.submit(_spec_of(constraint)))

    def ready(self) -> Iterator[tuple[Request, RametError | None]]:
        """Requests whose grammar is there, or why there is none; each once."""
        for serial, (request, pending) in list(self._pending.items()):
            if not pending.done():
                continue
            del self._pending[serial]
            constraint = request.sampling.constraint
            assert constraint is not None
            try:
                grammar = pending.result()
                matcher = grammar.matcher()
            except RametError as error:
                yield request, error
                continue
            except Exception as error:
                yield request, _own(error)
                continue
            self._guides[serial] = Guide(
                matcher,
                self._ends,
                constraint.after.encode(),
                self._names,
                apart=grammar.kind in APART,
            )
            yield request, None

    def forget(self, request: Request) -> None:
        """The request is over, also when its grammar never came. Unknown ones are ignored."""
        if (found := self._pending.pop(request.serial, None)) is not None:
            found[1].cancel()
        self._guides.pop(request.serial, None)

    def masks(self, planned: Planned, rows: Rows, out: IntArray) -> Failures:
        """Fill ``out`` [M, ceil(V / 32)], a row for each masked sample; the requests that cannot go
        on. Samples that no longer count may be anything."""
        jobs: list[Job] = []
        for at, mask in zip(planned.batch.masked.tolist(), out):
            row = int(planned.rows[at])
            request = rows.requests[row]
            if request is None or rows.epoch[row] != planned.epochs[at]:
                mask.fill(ANYTHING)
            else:
                jobs.append(Job(request, self._guides[request.serial], mask))
        return self._filler.fill(jobs)

    def close(self) -> None:
        self._filler.close()
        if self._compiler is not None:
            self._compiler.close()
