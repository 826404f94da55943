"""The seam between the language and whatever runs programs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ramet.runtime.program.instructions import Instruction, Program
from ramet.runtime.protocol import BackendError, BadInputError

from .store import EventStore


@dataclass(frozen=True, slots=True)
class Opening:
    """How a program is to run: arguments, default sampling, whether its text comes in deltas."""

    name: str = ""
    args: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    sampling: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    stream: bool = False
    cache_salt: str | None = None
    registered: Program | None = None
    """A program given to `Backend.register` before; nothing else is sent then."""


class Session(ABC):
    """The client's side of one running program. Both methods return at once, from any thread.

    Calls to `send` come in program order. What comes back goes to ``store``; a backend that fails
    calls ``store.fail``. After `cancel` nothing more need come.
    """

    def __init__(self) -> None:
        self.store = EventStore()

    @abstractmethod
    def send(self, instructions: Sequence[Instruction], closed: bool) -> None:
        """Hand over instructions; the first call opens the program, ``closed`` ends it."""

    @abstractmethod
    def cancel(self) -> None:
        """Drop what has not run and abort what runs."""


class Backend(ABC):
    """Runs programs. One backend serves any number of sessions and threads at a time."""

    max_in_flight = 1024
    """How many programs of a batch are sent at a time, where the user does not say."""

    @abstractmethod
    def open(self, opening: Opening) -> Session:
        """A session for a new program; raises `BackendError` where it cannot be."""

    def register(self, program: Program) -> None:
        """Make ``program`` known, so that `Opening.registered` may name it. Idempotent."""
        del program

    def flush_cache(self) -> None:
        """Forget every cached prefix."""
        raise self._lacks("flush_cache")

    def server_info(self) -> dict[str, Any]:
        """What runs there, and how full it is."""
        raise self._lacks("server_info")

    def explain(
        self, prompt: str, other: str | None = None, *, cache_salt: str | None = None
    ) -> dict[str, Any]:
        """Where a prompt leaves what is cached there now, or another prompt: ``explanation``, as
        `generate` gives it with ``explain``, and how many tokens the prompts have."""
        del prompt, other, cache_salt
        raise self._lacks("explain")

    def shutdown(self) -> None:
        """Let go of connections and processes. Idempotent."""
        return

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def _lacks(self, what: str) -> BackendError:
        return BackendError(f"{type(self).__name__} has no {what}")


class _Default:
    backend: Backend | None = None


def set_default_backend(backend: Backend | None) -> None:
    """The backend of every run that names none; None takes it away."""
    if backend is not None:
        _check(backend)
    _Default.backend = backend


def default_backend(backend: Backend | None = None) -> Backend:
    """``backend``, or else the default one. Raises `BackendError` when there is none."""
    chosen = backend if backend is not None else _Default.backend
    if chosen is None:
        raise BackendError("no backend: pass backend= or call ramet.set_default_backend()")
    return _check(chosen)


def _check(backend: object) -> Backend:
    if not isinstance(backend, Backend):
        raise BadInputError(
            f"backend must be a Runtime, a RuntimeEndpoint or the like, not {backend!r}",
            param="backend",
        )
    return backend
