"""What a stream is sure to do after a generation, as far as its program was sent."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any, cast

from ..protocol.errors import RametError
from ..protocol.sampling import sampling_from
from .ahead import reads_of
from .cell import Cell
from .executor import Context, Following, GoesOn
from .instructions import Gen, Text
from .stream import Stream
from .taken import Resolved

MOST = 8
"""Generations that follow one, and instructions that are looked at for each."""


def announce(stream: Stream, context: Context, sampling: Mapping[str, Any], remaining: int) -> None:
    """A generation begins: tell its context what follows it, if that can use it. ``sampling`` is
    the program's; ``remaining`` requests of it are to come."""
    if stream.queue and hasattr(context, "announce"):
        cast("GoesOn", context).announce(following(stream, sampling, remaining))


def following(stream: Stream, sampling: Mapping[str, Any], remaining: int) -> list[Following]:
    """The generations that come next with nothing but text that is known between them; after the
    one that begins now, ``remaining`` requests of the program are to come."""
    found: list[Following] = []
    texts: list[str] = []
    for at, taken in enumerate(islice(stream.queue, MOST * MOST)):
        instruction = taken.instruction
        if isinstance(instruction, Text):
            known = list(map(_known, taken.parts))
            if None in known:
                break
            texts.append("".join(text for text in known if text is not None))
        elif isinstance(instruction, Gen) and len(found) < MOST:
            try:
                taken.params = sampling_from(sampling, instruction.sampling)
            except RametError:
                break  # told when it begins
            remaining = max(remaining - 1, 0)
            found.append(Following(tuple(texts), taken.params, remaining, reads_of(stream, at + 1)))
            texts = []
        else:
            break
    return found


def _known(part: Resolved) -> str | None:
    if isinstance(part, Cell):
        part = part.value if part.ready and isinstance(part.value, str) else ""
        return part or None
    return part if isinstance(part, str) else None
