"""Many outputs of llguidance at once, in threads of which each has lexers to itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from ..protocol.errors import GrammarError
from .crew import Crew
from .llguidance_matcher import LLGuidanceMatcher

if TYPE_CHECKING:
    from llguidance import LLExecutor

SUSPECT_SECONDS = 0.05
"""For many at once, most of which take microseconds."""
MOVED_TOKENS = 512
"""Tokens that may be read again in a step for outputs to have a lexer of fewer."""

Wanted = tuple[LLGuidanceMatcher, int]
_T = TypeVar("_T")


class SideBySide:
    """Does for several matchers what each could do alone. What goes wrong with one is in its error
    state, which it sees when it is asked next; what the library raises is raised.

    Matchers of one lexer wait for each other, so one thread has all of them. For a thread, a list
    is one call of the library, by its executor of one thread, which leaves the interpreter once.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._crew = Crew()
        self._executors: list[LLExecutor] = []

    def fill(self, masks: npt.NDArray[np.int32], wanted: Sequence[Wanted]) -> None:
        """Compute row i of ``masks`` [M, ceil(V / 32)], contiguous, for each (matcher, i) of those
        that `LLGuidanceMatcher.computes` said must be."""
        spread(wanted)
        address, stride, rows = masks.ctypes.data, masks.strides[0], len(masks)

        def fill(executor: LLExecutor, part: list[int]) -> None:
            with _suspecting(wanted, part):
                catch_up(executor, [wanted[k][0] for k in part])
                of = [(wanted[k][0].inner, wanted[k][1]) for k in part]
                executor.unsafe_compute_mask_ptr(of, address, stride, rows)

        self._each(shares(by_lexer(wanted), self._threads), fill)

    def accept(self, wanted: Sequence[Wanted]) -> list[bool]:
        """Have each matcher's library take a token that `LLGuidanceMatcher.asks_library` is for;
        which did, and now await `LLGuidanceMatcher.took`."""

        def accept(executor: LLExecutor, part: list[int]) -> list[bool]:
            of = [(wanted[k][0].inner, wanted[k][1]) for k in part]
            with _suspecting(wanted, part):
                return executor.consume_token_par(of)

        parts = shares(by_lexer(wanted), self._threads)
        taken = [False] * len(wanted)
        for part, results in zip(parts, self._each(parts, accept)):
            for k, one in zip(part, results):
                taken[k] = one
        return taken

    def _each(
        self, parts: list[list[int]], work: Callable[[LLExecutor, list[int]], _T]
    ) -> list[_T]:
        """Do each part in a thread of its own."""
        if len(self._executors) < len(parts):
            from llguidance import LLExecutor

            self._executors += [LLExecutor(1) for _ in parts[len(self._executors) :]]
        calls = [partial(work, one, part) for one, part in zip(self._executors, parts)]
        return self._crew.run(calls)


def catch_up(executor: LLExecutor, matchers: Sequence[LLGuidanceMatcher]) -> None:
    """Have the library read what it has yet to, out of the interpreter."""
    late = [(matcher, unread) for matcher in matchers if (unread := matcher.take_unread())]
    try:
        for i in range(max((len(unread) for _, unread in late), default=0)):
            executor.consume_token_par(
                [(m.inner, unread[i]) for m, unread in late if i < len(unread)]
            )
    except Exception:
        for matcher, _ in late:  # some may have read a part, who knows which
            with contextlib.suppress(GrammarError):  # it will be met again
                matcher.begin_anew()
        raise


@contextmanager
def _suspecting(wanted: Sequence[Wanted], part: list[int]) -> Iterator[None]:
    """Where a part took long, any of it may be why: each is measured the next time."""
    began = perf_counter()
    yield
    if perf_counter() - began > SUSPECT_SECONDS:
        for k in part:
            wanted[k][0].slow = True


def by_lexer(wanted: Sequence[Wanted]) -> list[list[int]]:
    """Where in ``wanted`` those of each lexer are."""
    groups: dict[int, list[int]] = {}
    for k, (matcher, _) in enumerate(wanted):
        groups.setdefault(id(matcher.lexer), []).append(k)
    return list(groups.values())


def shares(groups: list[list[int]], most: int) -> list[list[int]]:
    """Groups put together to at most so many, about as large as each other."""
    if len(groups) <= most:
        return groups
    parts: list[list[int]] = [[] for _ in range(most)]
    for group in sorted(groups, key=len, reverse=True):
        min(parts, key=len).extend(group)
    return parts


def spread(wanted: Sequence[Wanted]) -> None:
    """Move some matchers to lexers that fewer use."""
    left = MOVED_TOKENS
    for group in by_lexer(wanted):
        for k in group:
            matcher = wanted[k][0]
            emptier = matcher.lexer.emptier()
            if emptier is None:
                break
            left -= 1 + matcher.move(emptier)
            if left <= 0:
                return
