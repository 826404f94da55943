"""Bounds on what one program may grow to while it runs."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Checked as the program runs, so that repeated references, loops and nested forks cannot
    explode. ``instructions`` and ``streams`` count those of a loop in each turn; ``blocks`` is how
    deep switches and repeats may nest, ``turns`` bounds one repeat."""

    instructions: int = 1_000_000
    text_bytes: int = 64 << 20
    streams: int = 10_000
    depth: int = 64
    blocks: int = 16
    turns: int = 10_000
    seconds: float = 86_400.0
