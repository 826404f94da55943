"""The exceptions a user can catch, and the form in which they cross a process."""

from __future__ import annotations

import msgspec


class RametError(Exception):
    """Root of every error that ramet raises on purpose."""

    kind = "error"

    def __init__(self, message: str, *, where: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.param = param

    def __str__(self) -> str:
        return f"{self.message} (at {self.where})" if self.where else self.message


class ProgramError(RametError):
    """A program asked for something impossible; ``where`` names the source line when it is
    known."""

    kind = "program"


class MissingValueError(ProgramError, KeyError):
    """A value was read that the program never generates."""

    kind = "missing_value"


class BadInputError(ProgramError, ValueError):
    """A value is outside what is allowed; ``param`` names it."""

    kind = "bad_input"


class ContextLengthError(BadInputError):
    """Prompt beyond the model's context, or too large for the KV memory there is."""

    kind = "context_length"


class ModelError(RametError):
    """A model could not be found, fetched, verified or loaded."""

    kind = "model"


class GrammarError(RametError):
    """A constraint that cannot be honoured. ``where`` is a position or a path inside the spec."""

    kind = "grammar"


class BackendError(RametError):
    """The engine is gone, the peer spoke nonsense, a deadline passed, or work was aborted."""

    kind = "backend"


class AbortedError(BackendError):
    """The work was aborted by the caller, by a disconnect or by a limit."""

    kind = "aborted"


class QueueFullError(BackendError):
    """More requests wait than are let wait; a later try may do."""

    kind = "queue_full"


_KINDS: dict[str, type[RametError]] = {
    cls.kind: cls
    for cls in (
        RametError,
        ProgramError,
        MissingValueError,
        BadInputError,
        ContextLengthError,
        ModelError,
        GrammarError,
        BackendError,
        AbortedError,
        QueueFullError,
    )
}


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error as data: what crosses a socket instead of a pickled exception."""

    kind: str
    message: str
    where: str | None = None
    param: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> ErrorInfo:
        """Describe any exception; foreign ones become a plain ``error`` with their type's name."""
        if isinstance(error, RametError):
            return cls(error.kind, error.message, error.where, error.param)
        return cls("error", f"{type(error).__name__}: {error}")

    def exception(self) -> RametError:
        """The exception to raise where the value is read (a fresh one each time)."""
        cls = _KINDS.get(self.kind, RametError)
        return cls(self.message, where=self.where, param=self.param)
