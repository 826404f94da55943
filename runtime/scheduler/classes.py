"""Named classes of requests: how urgent each is, and what it may take."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from ..protocol.errors import BadInputError

DEFAULT_CLASS = "interactive"
MOST_CLASSES = 64


class PriorityClass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``priority``: lower goes first; a request's own is added to it. The bounds are on all the
    class's requests together, but for ``context_length``, which is on each: prompt and answer. None
    is no bound beyond those of everybody."""

    priority: int = 0
    max_running: int | None = None
    max_queued: int | None = None
    max_queued_tokens: int | None = None
    context_length: int | None = None


CLASSES: Mapping[str, PriorityClass] = MappingProxyType(
    {DEFAULT_CLASS: PriorityClass(), "batch": PriorityClass(priority=10)}
)
"""Those that are there without being asked for."""


def parse_classes(text: str | None) -> Mapping[str, PriorityClass]:
    """Classes by name, of JSON objects, one a line; what is not given is as in `CLASSES`. Raises
    `BadInputError`."""
    classes = dict(CLASSES)
    for line in _objects(text or ""):
        for name, cls in line.items():
            if not 1 <= len(name) <= MOST_CLASSES or not name.isprintable():
                raise _bad(f"{name!r} is no name of a class")
            _check(name, cls)
            classes[name] = cls
    if len(classes) > MOST_CLASSES:
        raise _bad(f"{len(classes)} classes; at most {MOST_CLASSES}")
    return classes


def _objects(text: str) -> list[dict[str, PriorityClass]]:
    decoder = msgspec.json.Decoder(dict[str, PriorityClass])
    try:
        return [decoder.decode(line) for line in text.split("\n") if line.strip()]
    except msgspec.DecodeError as error:
        raise _bad(str(error).replace("`", "")) from None


def _check(name: str, cls: PriorityClass) -> None:
    if abs(cls.priority) > 1_000_000:
        raise _bad(f"{name}: priority must be in [-1000000, 1000000]")
    for field in ("max_running", "max_queued", "max_queued_tokens", "context_length"):
        bound = getattr(cls, field)
        if bound is not None and bound < (2 if field == "context_length" else 1):
            raise _bad(f"{name}: {field} is too small: {bound}")


def _bad(message: str) -> BadInputError:
    return BadInputError(f"priority_classes: {message}", param="priority_classes")
