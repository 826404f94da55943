"""The frame of every parser: a generator that is sent the text.

It gets one character at a time, or, where it yields a pattern, a run of characters up to the next
that the pattern finds: most of a text means nothing to it. A machine decides by the characters
alone and never by how they were cut into pieces or runs, so any split of a text gives the same
events. Characters that are not decided on yet are *held*; they become content when it turns out
that they are no call.
"""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Generator
from functools import lru_cache
from typing import ClassVar, TypeAlias, TypeVar

from .events import CallArguments, CallBegin, Content, Event, merged

T = TypeVar("T")
MOST_REREAD = 256
"""Characters of a failed call in which another one is looked for. A bound, as each may fail."""

Reads: TypeAlias = Generator["re.Pattern[str] | None", str, T]
"""A piece of a machine: each ``yield`` is the next character of the text, or a run of them."""


class NotACallError(Exception):
    """What looked like a call is none."""


class _EndOfText(Exception):  # noqa: N818 (a signal, not an error)
    pass


class ToolParser(ABC):
    """Finds calls in one answer. ``names`` are the tools there are; machines whose calls carry no
    mark of their own take nothing else for a call. ``most``: calls beyond so many are left out."""

    marks: ClassVar[tuple[str, ...]] = ()
    """Texts that are special tokens in some vocabularies, and must be seen all the same."""
    short_ids: ClassVar[bool] = False
    """Whether the templates of these models want ids of nine letters and digits."""

    def __init__(self, names: Collection[str] = (), most: int | None = None) -> None:
        self.names = frozenset(names)
        self.calls = 0
        self._most = most
        self._open = False
        self._held: list[str] = []
        self._marked = 0
        self._again: deque[str] = deque()
        self._events: list[Event] = []
        self._machine = self._read()
        self._ends_run = next(self._machine)

    @abstractmethod
    def _read(self) -> Reads[None]:
        """The machine itself; it never returns."""

    def push(self, text: str) -> list[Event]:
        """What the next piece of text makes certain."""
        at = 0
        while at < len(text):
            end = at + 1
            if self._ends_run is not None:
                found = self._ends_run.search(text, at)
                end = max(end, found.start() if found is not None else len(text))
            self._send(text[at:end])
            while self._again:
                self._send(self._again.popleft())
            at = end
        return self._taken()

    def _send(self, text: str) -> None:
        self._held.append(text)
        self._ends_run = self._machine.send(text)

    def finish(self) -> list[Event]:
        """What is left when no more text comes. Use the parser no further."""
        with contextlib.suppress(_EndOfText):
            self._machine.throw(_EndOfText())
        if not self._open and (self.calls == 0 or "".join(self._held).strip()):
            self._release()
        return self._taken()

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        most = self._most
        if most is not None:
            events = [e for e in events if isinstance(e, Content) or e.index < most]
        return merged(events)

    # --- what machines do -------------------------------------------------------------------------

    def _release(self, but: int = 0) -> None:
        """What is held is content, ``but`` for so many of what was sent last."""
        count = len(self._held) - but
        if count > 0:
            self._events.append(Content("".join(self._held[:count])))
            del self._held[:count]

    def _drop(self) -> None:
        """What is held belongs to a call."""
        self._held.clear()

    def _unread(self) -> None:
        """The last character comes once more."""
        self._again.appendleft(self._held.pop())

    def _reread(self) -> None:
        """The mark that was met last is content; what is held behind it comes once more."""
        rest = "".join(self._held[self._marked :])
        if len(rest) <= MOST_REREAD:
            self._again.extendleft(reversed(rest))
            del self._held[self._marked :]
        self._release()

    def _begin(self, name: str) -> None:
        self._events.append(CallBegin(self.calls, name))
        self.calls += 1
        self._open = True
        self._drop()

    def _argue(self, text: str) -> None:
        self._events.append(CallArguments(self.calls - 1, text))
        self._drop()

    def _end(self) -> None:
        """The call that is open has all its arguments."""
        self._open = False
        self._drop()

    # --- how machines read ------------------------------------------------------------------------

    def _solid(self) -> Reads[str]:
        """The next character that is no blank."""
        while (character := (yield)).isspace():
            pass
        return character

    def _content_to(self, *marks: str) -> Reads[str]:
        """Content up to one of the marks, which is returned. Blanks before a mark are no content.
        A mark stays held. No mark may begin with another."""
        pending = ""
        ends_run = _first_of(marks)
        while True:
            text = yield (None if pending else ends_run)
            if len(text) > 1:
                self._run(text)
                continue
            pending += text
            while pending and not any(mark.startswith(pending) for mark in marks):
                first, pending = pending[0], pending[1:]
                if not first.isspace():
                    self._release(but=len(pending))
            if pending in marks:
                self._marked = len(self._held)
                return pending

    def _run(self, text: str) -> None:
        """Characters with which no mark begins: content, but for blanks at the end."""
        solid = text.rstrip()
        if solid:
            self._held[-1] = solid
            self._release()
            if len(solid) < len(text):
                self._held.append(text[len(solid) :])

    def _skip_to(self, mark: str) -> Reads[None]:
        """Leave out what stands before a mark, and the mark."""
        text = ""
        while not text.endswith(mark):
            text = text[-len(mark) :] + (yield)
            self._drop()

    def _text_to(self, *marks: str, most: int = 1024) -> Reads[tuple[str, str]]:
        """Text up to a mark, and the mark. Raises `NotACallError` when none comes soon."""
        text = ""
        while len(text) <= most:
            text += yield
            for mark in marks:
                if text.endswith(mark):
                    return text[: -len(mark)], mark
        raise NotACallError

    def _rest_is_content(self) -> Reads[None]:
        """All that comes, and what is held. Never returns."""
        while True:
            self._release()
            yield _NOTHING


@lru_cache
def _first_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Finds where one of the marks may begin."""
    return re.compile("[" + "".join(re.escape(mark[0]) for mark in marks) + "]")


_NOTHING = re.compile("(?!)")
