from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import ramet as rt
from ramet.backends.base import Backend, Opening, Session


class Spy(Backend):
    """Passes everything on and keeps what was sent: (kinds of instructions, closed) a message."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.openings: list[Opening] = []
        self.sent: list[tuple[list[Any], bool]] = []
        self.cancels = 0
        self.registered: list[Any] = []

    def open(self, opening: Opening) -> Session:
        self.openings.append(opening)
        return _SpySession(self, self.inner.open(opening))

    def register(self, program: Any) -> None:
        self.registered.append(program)
        self.inner.register(program)

    @property
    def messages(self) -> list[list[str]]:
        return [[type(i).__name__ for i in instructions] for instructions, _ in self.sent]


class _SpySession(Session):
    def __init__(self, spy: Spy, inner: Session) -> None:
        self.spy = spy
        self.inner = inner
        self.store = inner.store

    def send(self, instructions: Sequence[Any], closed: bool) -> None:
        self.spy.sent.append((list(instructions), closed))
        self.inner.send(instructions, closed)

    def cancel(self) -> None:
        self.spy.cancels += 1
        self.inner.cancel()


@pytest.fixture
def scripted() -> Callable[..., Any]:
    """Makes a backend that answers from a script."""
    return rt.testing.ScriptedBackend


@pytest.fixture
def spy(scripted: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a scripted backend that keeps what was sent to it."""
    return lambda *args, **kwargs: Spy(scripted(*args, **kwargs))
