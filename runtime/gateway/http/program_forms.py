"""The bodies of requests about programs. What is optional may also be null."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from ...program.instructions import Instruction, Program
from .errors import bad

LEASE_S = 15.0
MOST_LEASE_S = 300.0


class ProgramForm(msgspec.Struct, kw_only=True):
    """``closed`` (the default) says that the program is whole; ``lease`` is in seconds."""

    program: Program | None = None
    args: dict[str, Any] | None = None
    sampling: dict[str, Any] | None = None
    stream: bool | None = None
    deltas: bool | None = None
    closed: bool | None = None
    lease: float | None = None
    model: str | None = None
    cache_salt: str | None = None
    priority: int | str | None = None

    def check(self) -> None:
        """Raises `HttpError`."""
        if self.lease is not None and not (
            math.isfinite(self.lease) and 0 < self.lease <= MOST_LEASE_S
        ):
            raise bad(f"lease must be in (0, {MOST_LEASE_S:g}] seconds", "lease")
        if self.closed is not False and self.program is None:
            raise bad("program is missing; one that comes in pieces has closed: false", "program")


class AppendForm(msgspec.Struct, kw_only=True):
    """More of a program that is open. None at all only renews its lease."""

    instructions: list[Instruction] | None = None
    closed: bool | None = None
    stream: bool | None = None
