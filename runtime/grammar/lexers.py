"""The lexers of one grammar on llguidance: outputs that share one wait for each other."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from .library_error import check

if TYPE_CHECKING:
    from llguidance import LLMatcher

log = logging.getLogger(__name__)

MOST_THREADS = 12
CROWD = 8
"""Outputs at one lexer, from which on another is worth its memory."""
MOST_BYTES = 64 << 20
"""Memory for the lexers of one grammar, the first aside."""


def threads_at_once() -> int:
    """How many threads compute masks at once, which is how many lexers are of use."""
    return max(min(MOST_THREADS, len(os.sched_getaffinity(0)) * 3 // 4), 1)


class Lexer:
    """A matcher at the start of an output, whose copies share all that it derives, and wait for
    each other while they do. ``at``: its place among the grammar's. ``users``: matchers that hold
    a copy."""

    __slots__ = ("at", "owner", "start", "users")

    def __init__(self, start: LLMatcher, at: int, owner: Lexers) -> None:
        self.start = start
        self.at = at
        self.owner = weakref.ref(owner)
        self.users: weakref.WeakSet[object] = weakref.WeakSet()

    def copy(self, user: object) -> LLMatcher:
        """A matcher at the start, which is ``user``'s."""
        self.users.add(user)
        return self.start.deep_copy()

    def is_worn(self) -> bool:
        """Whether it has met its bound, whoever's work took it there. From then on it refuses every
        token of every copy, and only who computes a mask is told why."""
        probe = self.start.deep_copy()
        probe.compute_bitmask()
        return probe.is_error()

    def is_replaced(self) -> bool:
        """Whether another has its place, as somebody met its bound."""
        owner = self.owner()
        return owner is not None and not owner.holds(self)

    def emptier(self) -> Lexer | None:
        """One that has so many users less that one of this one's should go there."""
        owner = self.owner()
        if owner is None or len(owner) < 2:
            return None
        other = owner.emptiest()
        return other if len(other.users) + 1 < len(self.users) else None


class Lexers:
    """Begins with one; more come, from a thread, when many outputs are at each. Thread-safe.

    ``make`` makes a matcher at the start with a lexer of its own. ``nbytes``: of one. ``most``: how
    many there may be; None is as many as there are threads to use them at once.
    """

    def __init__(
        self, make: Callable[[], LLMatcher], nbytes: int, growth: Growth, most: int | None = None
    ) -> None:
        self._make = make
        self._bytes = nbytes
        self._growth = growth
        most = threads_at_once() if most is None else most
        self._most = min(most, 1 + MOST_BYTES // max(nbytes, 1))
        self._lock = threading.Lock()
        self._growing = False
        self._all = [self._made(0)]

    def __len__(self) -> int:
        return len(self._all)

    @property
    def nbytes(self) -> int:
        return len(self._all) * self._bytes

    def emptiest(self) -> Lexer:
        """The one of the fewest users, for one more."""
        return min(self._all, key=_users)

    def take(self) -> Lexer:
        """The same, and another is asked for if there are too few."""
        found = self.emptiest()
        if len(found.users) >= CROWD and len(self._all) < self._most and not self._growing:
            self._growing = True
            self._growth.ask(self)
        return found

    def holds(self, lexer: Lexer) -> bool:
        """Whether it is still one of these."""
        return self._all[lexer.at] is lexer

    def renew(self, worn: Lexer) -> tuple[Lexer, bool]:
        """What takes the place of a lexer that has met its bound, and whether it was made for this.
        Raises `GrammarError` if none can be made."""
        with self._lock:
            made = self.holds(worn)
            if made:
                self._all[worn.at] = self._made(worn.at)
            return self._all[worn.at], made

    def grow(self) -> bool:
        """Add one; whether it is not the last that is wanted now. Raises what `renew` does."""
        # Out of the lock, which those wait for who cannot go on without a new one.
        made = self._made(len(self._all))
        with self._lock:
            self._all = [*self._all, made]
            users = sum(map(_users, self._all))
            self._growing = len(self._all) < self._most and users > CROWD * len(self._all)
            return self._growing

    def _made(self, at: int) -> Lexer:
        start = self._make()
        check(start)
        return Lexer(start, at, self)


class Growth:
    """Makes lexers for those who ask, one at a time, in a thread that ends when nobody does. One
    that cannot be made is no error: its grammar goes on with those it has."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: deque[weakref.ref[Lexers]] = deque()
        self._thread: threading.Thread | None = None

    def ask(self, lexers: Lexers) -> None:
        """Let ``lexers`` have what it wants, unless it is gone by then. Returns at once."""
        with self._lock:
            self._asked.append(weakref.ref(lexers))
            if self._thread is None:
                # No daemon: one would be stopped within the library when the interpreter ends.
                thread = threading.Thread(target=self._work, name="ramet-lexers")
                try:
                    thread.start()
                    self._thread = thread
                except RuntimeError as error:  # the system has no more
                    self._asked.clear()
                    log.warning("no thread to make lexers: %s", error)

    def _work(self) -> None:
        main = threading.main_thread()
        while True:
            with self._lock:
                if not self._asked or not main.is_alive():
                    self._asked.clear()
                    self._thread = None
                    return
                asked = self._asked.popleft()
            if _grown(asked):
                with self._lock:
                    self._asked.append(asked)


def _grown(asked: weakref.ref[Lexers]) -> bool:
    """Make one for who asked; whether they want another."""
    lexers = asked()
    if lexers is None:
        return False
    try:
        return lexers.grow()
    except Exception as error:  # they do not ask again
        log.warning("a grammar goes on with %d lexers: %s", len(lexers), error)
        return False


def _users(lexer: Lexer) -> int:
    return len(lexer.users)
