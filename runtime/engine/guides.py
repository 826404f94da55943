"""Requests whose output must match something: their grammars while those are compiled, and where
each output is in its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

from ..grammar.llguidance_matcher import LLGuidanceMatcher
from ..grammar.matcher import Grammar, Matcher
from ..grammar.prefix_matcher import PrefixMatcher
from ..grammar.spec import Spec
from ..protocol.errors import GrammarError, RametError
from ..protocol.messages import EngineSampling
from ..protocol.sampling import Constraint
from ..scheduler.batch import IntArray
from ..scheduler.building import Planned
from ..scheduler.request import Request
from ..scheduler.rows import Rows
from .healing import Prefixes
from .together import ANYTHING, MANY_STEPS, Failures, Job, Together, own_error


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
    """One output in its grammar, if it has one. With ``after``, whatever comes up to that text is
    free; ``opening`` is what comes before all of that. ``jumps``: forced tokens are not sampled.

    What the library behind a matcher raises is a `GrammarError` here: it fails one request.
    """

    def __init__(
        self,
        matcher: Matcher | None,
        ends: Collection[int],
        after: bytes = b"",
        names: Mapping[int, bytes] | None = None,
        *,
        opening: PrefixMatcher | None = None,
        jumps: bool = True,
    ) -> None:
        self._matcher = matcher
        self._held: Matcher | None = None
        """The matcher, where it has a say by now."""
        self.beside: LLGuidanceMatcher | None = None
        """The same, where others of its kind can work at once."""
        self._jumps = jumps
        self._opening = opening
        self._taken: int | None = None
        self._ends = ends
        self._names = names or {}
        self.ended = False
        """Whether the last token was one that ends an answer, and no text."""
        self._after = after
        self._tail = b""
        self._let_say()

    def row(self) -> IntArray | None:
        """The tokens allowed next, where they are kept: the same object for guides alike, not to be
        changed. None: `fill` says them."""
        if self._opening is not None or self._held is None:
            return None
        return self._held.row()

    def fill(self, row: IntArray) -> None:
        """Write the tokens allowed next. Raises `GrammarError` when there are none."""
        matcher = self._opening or self._held
        if matcher is None:
            row.fill(ANYTHING)
            return
        try:
            matcher.fill(row)
        except Exception as error:
            raise own_error(error) from error

    def accept(self, token: int, data: bytes) -> None:
        """Go on by a token, whose bytes are ``data``. Raises `GrammarError`."""
        if self._opening is not None:
            data = self._open(self._opening, token, data)
            if data and self._after:
                self._seek(data)
            return
        if self._after:
            self._seek(data or self._names.get(token, b""))
            return
        if self._matcher is None:
            return
        ahead, self._taken = self._taken, None
        if ahead == token:
            return
        try:
            taken = self._matcher.accept(token)
        except Exception as error:
            raise own_error(error) from error
        if not taken:
            raise GrammarError(f"the grammar does not go on with token {token}")
        self.ended = token in self._ends

    def passes(self, token: int) -> bool:
        """Go on by a token where it is known at once that `accept` takes it, that the output is not
        done then, and that nothing is forced or nobody jumps. If not, nothing has changed."""
        held = self._held
        return held is not None and held.passes(token, self._jumps)

    def took(self, token: int) -> None:
        """The matcher has gone on by ``token``, which `accept` is called with next."""
        self._taken = token

    def _open(self, opening: PrefixMatcher, token: int, data: bytes) -> bytes:
        """Go on by a token of what comes first; what of its bytes is past that."""
        begun = len(opening.rest)
        if not opening.accept(token):
            raise GrammarError(f"token {token} does not go on with what must come first")
        if not opening.rest:
            self._opening = None
            self._let_say()
        return data[begun:]

    def _seek(self, data: bytes) -> None:
        """Look for the text after which the grammar begins."""
        self._tail = (self._tail + data)[-len(self._after) - len(data) :]
        if self._after in self._tail:
            self._after = b""
            self._let_say()

    def _let_say(self) -> None:
        """The matcher has its say where nothing is left to come before."""
        if self._opening is None and not self._after:
            self._held = matcher = self._matcher
            self.beside = matcher if isinstance(matcher, LLGuidanceMatcher) else None

    @property
    def done(self) -> bool:
        """Whether nothing more can come. Raises `GrammarError`."""
        try:
            return self._held is not None and self._held.is_done()
        except Exception as error:
            raise own_error(error) from error

    def forced(self, recent: Sequence[int]) -> list[int]:
        """Tokens that must come next, to be accepted one by one. ``recent``: what came before.
        Raises `GrammarError`."""
        try:
            return [] if self._held is None else self._held.forced_tokens(recent)
        except Exception as error:
            raise own_error(error) from error


_FREE = np.full(1, ANYTHING, np.int32)
"""The row of samples to which nothing is forbidden."""


@lru_cache(maxsize=64)
def _spec_of(constraint: Constraint, prefix: str) -> Spec:
    """Remembered, as its key takes a while to make of a long one."""
    return Spec.of(constraint.kind, constraint.spec, constraint.whitespace, prefix)


class Guides:
    """Guides of the engine's requests, by request. ``compiler`` is made when it is first needed;
    ``ends`` are the ids that end an answer, ``names`` what tokens without text are called,
    ``prefixes`` makes matchers of what an output begins with."""

    def __init__(
        self,
        compiler: Callable[[], Compiler],
        ends: Collection[int],
        names: Mapping[int, bytes] | None = None,
        prefixes: Prefixes | None = None,
    ) -> None:
        self._make = compiler
        self._prefixes = prefixes
        self._names = names or {}
        self._ends = frozenset(ends)
        self._compiler: Compiler | None = None
        self._together = Together()
        self._pending: dict[int, tuple[Request, Pending | Prefixes]] = {}
        self._guides: dict[int, Guide] = {}

    def __getitem__(self, request: Request) -> Guide:
        return self._guides[request.serial]

    @property
    def waiting(self) -> bool:
        """Whether some grammar is being compiled."""
        return bool(self._pending)

    def start(self, request: Request) -> None:
        """Have the request's grammar compiled; `ready` tells when it is. Raises `RametError`."""
        constraint = request.sampling.constraint
        if constraint is None:
            self._pending[request.serial] = (request, self._opened())
            return
        if self._compiler is None:
            self._compiler = self._make()
        prefix = "" if constraint.after else request.sampling.heal.decode()
        spec = _spec_of(constraint, prefix)
        self._pending[request.serial] = (request, self._compiler.submit(spec))

    def _opened(self) -> Prefixes:
        if self._prefixes is None:
            raise GrammarError("this engine cannot say what an output begins with")
        return self._prefixes.start()

    def ready(self) -> Iterator[tuple[Request, RametError | None]]:
        """Requests whose grammar is there, or why there is none; each once."""
        for serial, (request, pending) in list(self._pending.items()):
            if not pending.done():
                continue
            del self._pending[serial]
            try:
                self._guides[serial] = self._guide(request, pending)
            except RametError as error:
                yield request, error
                continue
            except Exception as error:
                yield request, own_error(error)
                continue
            yield request, None

    def _guide(self, request: Request, pending: Pending | Prefixes) -> Guide:
        """Of a request whose grammar is there."""
        constraint, heal = request.sampling.constraint, request.sampling.heal
        if isinstance(pending, Prefixes):
            return Guide(None, self._ends, opening=pending.result().matcher(heal))
        assert constraint is not None
        grammar = pending.result()
        opening = None
        if heal and constraint.after:  # it comes before the thinking, not before the grammar
            opening = self._opened().result().matcher(heal)
        return Guide(
            grammar.matcher(),
            self._ends,
            constraint.after.encode(),
            self._names,
            opening=opening,
            jumps=may_jump(request.sampling),
        )

    def forget(self, request: Request) -> None:
        """The request is over, also when its grammar never came. Unknown ones are ignored."""
        if (found := self._pending.pop(request.serial, None)) is not None:
            found[1].cancel()
        self._guides.pop(request.serial, None)

    def masks(self, planned: Planned, rows: Rows, out: IntArray) -> tuple[IntArray, Failures]:
        """For each masked sample the row of ``out`` [M, ceil(V / 32)] that it may sample from, [M]
        int32; those rows are filled, from the first. And the requests that cannot go on. Samples
        that no longer count may be anything."""
        masked = planned.batch.masked
        at = planned.rows[masked]
        counts = (rows.epoch[at] == planned.epochs[masked]).tolist()
        of: list[int] = []
        used = 0
        alike: dict[int, int] = {}
        jobs: list[Job] = []
        for count, row in zip(counts, at.tolist()):
            request = rows.requests[row] if count else None
            guide = None if request is None else self._guides.get(request.serial)
            if request is None or guide is None:  # one that has healed since is free
                kept = _FREE
            else:
                kept = guide.row()
                if kept is None:
                    jobs.append(Job(request, guide, used))
                    of.append(used)
                    used += 1
                    continue
            place = alike.setdefault(id(kept), used)
            of.append(place)
            if place == used:
                out[place] = kept
                used += 1
        return np.array(of, np.int32), self._together.fill(jobs, out)

    def go_on(self, requests: Iterable[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """Have requests go on by a token each where that is all there is to do; the others, which
        `Guide.accept` follows for, once what can be done at once for them is done."""
        guides = self._guides
        left = [pair for pair in requests if not guides[pair[0].serial].passes(pair[1])]
        if len(left) >= MANY_STEPS:
            self._together.accept([(guides[r.serial], token) for r, token in left])
        return left

    def close(self) -> None:
        if self._compiler is not None:
            self._compiler.close()


def may_jump(sampling: EngineSampling) -> bool:
    """Whether forced tokens may be appended unsampled: not where each token's logits are asked for,
    or where the sampler counts tokens."""
    return (
        sampling.jump_forward
        and not sampling.logprobs
        and sampling.logprob_start < 0
        and sampling.repetition_penalty == 1.0
        and sampling.frequency_penalty == 0.0
        and sampling.presence_penalty == 0.0
    )
