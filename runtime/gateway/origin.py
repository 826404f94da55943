"""Whose work is under way, and how urgent it is.

Set where a request comes in, read where its work leaves for the engine. It travels with the task
(as a context variable) and not by hand, so that no path in between can forget it: what one key
cached, no other may hit.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ..protocol.errors import BadInputError

MOST_PRIORITY = 1_000_000
_LONGEST_CLASS = 64


class Origin(NamedTuple):
    """``owner``: the id of an API key, empty where none is asked for. ``priority``: lower goes
    first. ``cls``: the name of a priority class."""

    owner: bytes = b""
    priority: int = 0
    cls: str = ""


_NOBODY = Origin()
_current: contextvars.ContextVar[Origin] = contextvars.ContextVar("origin", default=_NOBODY)


def current() -> Origin:
    return _current.get()


def begin(owner: bytes) -> None:
    """A request of this owner begins, in the task that handles it."""
    _current.set(Origin(owner))


@contextmanager
def of(origin: Origin) -> Iterator[None]:
    """Work that begins inside is of this origin."""
    token = _current.set(origin)
    try:
        yield
    finally:
        _current.reset(token)


def set_priority(priority: object) -> None:
    """How urgent the request of this task is: a number, the name of a class, or ``None``. Raises
    `BadInputError`; whether there is such a class, the engine knows."""
    if priority is None:
        return
    if isinstance(priority, str) and 1 <= len(priority) <= _LONGEST_CLASS:
        _current.set(_current.get()._replace(cls=priority))
    elif isinstance(priority, int) and not isinstance(priority, bool):
        if not -MOST_PRIORITY <= priority <= MOST_PRIORITY:
            raise BadInputError(
                f"priority must be in [-{MOST_PRIORITY}, {MOST_PRIORITY}]", param="priority"
            )
        _current.set(_current.get()._replace(priority=priority))
    else:
        raise BadInputError("priority must be an integer or the name of a class", param="priority")
