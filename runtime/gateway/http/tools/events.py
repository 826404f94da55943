"""What a parser finds in a text, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text that is meant for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call begins. Its arguments follow; calls are numbered from 0 and do not overlap."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments. The pieces of one call make its JSON text."""

    index: int
    text: str


Event: TypeAlias = Content | CallBegin | CallArguments


def merged(events: list[Event]) -> list[Event]:
    """The same with neighbouring pieces of one kind joined."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + event.text)
        elif (
            isinstance(event, CallArguments)
            and isinstance(last, CallArguments)
            and event.index == last.index
        ):
            found[-1] = CallArguments(event.index, last.text + event.text)
        else:
            found.append(event)
    return found
