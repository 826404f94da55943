"""Bounds on what one program may grow to while it runs."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Checked as the program runs, so that repeated references and nested forks cannot explode."""

    instructions: int = 1_000_000
    text_bytes: int = 64 << 20
    streams: int = 10_000
    depth: int = 64
    seconds: float = 86_400.0
