"""What a running program reports to whoever started it."""

from __future__ import annotations

from typing import Any

import msgspec

from ..protocol.errors import ErrorInfo
from ..protocol.meta import MetaInfo


class TextDelta(msgspec.Struct, frozen=True, tag="delta", omit_defaults=True):
    """New text of a stream; ``op`` is the `Gen` or `Select` that made it, -1 for literals and
    markers.

    Sent only when the program was opened with ``stream=True``. ``meta`` carries the log-probs of
    just these tokens where they were asked for."""

    stream: int
    text: str
    op: int = -1
    meta: MetaInfo | None = None


class Value(msgspec.Struct, frozen=True, tag="value", omit_defaults=True):
    """An instruction's value: the text (a list for n > 1, or for a joined variable), and its meta.

    A list holds texts, ``None`` for a child that has no such variable, or lists again where a child
    has one (n > 1, or joined itself). Only a `Switch` or `Repeat` reports ``None`` by itself: of a
    name that it might have bound and has not."""

    stream: int
    op: int
    name: str | None = None
    value: str | list[Any] | None = None
    meta: MetaInfo | list[MetaInfo] | None = None


class Entered(msgspec.Struct, frozen=True, tag="entered", omit_defaults=True):
    """A `Switch` takes an arm: that of ``case``, or ``None``: the default. Or a `Repeat` begins its
    ``turn``, from 1. What its instructions report until the next of these is of this arm or turn;
    the streams that they fork have the same numbers in each."""

    stream: int
    op: int
    case: str | None = None
    turn: int = 0


class Synced(msgspec.Struct, frozen=True, tag="synced", omit_defaults=True):
    """A `Sync` was reached."""

    op: int
    text: str | None = None
    messages: list[dict[str, str]] | None = None


class Failed(msgspec.Struct, frozen=True, tag="failed", omit_defaults=True):
    """An instruction failed. The stream stops there, and so does whatever waits on its values."""

    stream: int
    op: int
    error: ErrorInfo


class Warned(msgspec.Struct, frozen=True, tag="warned"):
    """Something worth knowing, such as a chat template that rewrites its history."""

    stream: int
    name: str
    message: str


class Done(msgspec.Struct, frozen=True, tag="done", omit_defaults=True):
    """The program has ended; nothing more will come. ``error`` is set when all of it failed."""

    error: ErrorInfo | None = None


Event = TextDelta | Value | Entered | Synced | Failed | Warned | Done
