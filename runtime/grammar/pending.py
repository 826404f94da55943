"""A grammar that is being compiled, and those who wait for it."""

from __future__ import annotations

import threading
import time

from ..protocol.errors import ErrorInfo, RametError
from .matcher import Grammar
from .spec import Spec


class Flight:
    """One compilation, shared by all who asked for the same spec while it went on."""

    def __init__(self, spec: Spec, seconds: float) -> None:
        self.spec = spec
        self.seconds = seconds
        self.submitted = time.monotonic()
        self.waiting = 0
        self.landed = threading.Event()
        self.grammar: Grammar | None = None
        self.error: ErrorInfo | None = None

    def land(self, grammar: Grammar | None = None, error: RametError | None = None) -> None:
        """It came out so. Once."""
        self.grammar = grammar
        self.error = None if error is None else ErrorInfo.of(error)
        self.landed.set()


class Pending:
    """One waiter's view of a compilation."""

    def __init__(self, flight: Flight) -> None:
        self._flight = flight
        self._left = False
        flight.waiting += 1

    @property
    def spec(self) -> Spec:
        return self._flight.spec

    def done(self) -> bool:
        """Whether `result` answers at once."""
        return self._flight.landed.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it is done; False if it is not in time."""
        return self._flight.landed.wait(timeout)

    def result(self) -> Grammar:
        """The grammar. Blocks until it is there; raises a fresh `GrammarError` where it cannot be
        compiled, `BackendError` where the compiler is closed or cannot work."""
        self._flight.landed.wait()
        if self._flight.grammar is not None:
            return self._flight.grammar
        assert self._flight.error is not None
        raise self._flight.error.exception()

    def cancel(self) -> None:
        """This waiter does not want it any more; what nobody wants is not begun."""
        if not self._left:
            self._left = True
            self._flight.waiting -= 1
