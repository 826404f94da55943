"""Threads that do several calls at once, each of which leaves the interpreter while it works."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, TypeVar

_T = TypeVar("_T")
_Inbox = SimpleQueue[tuple[int, Callable[[], Any]] | None]
_Outbox = SimpleQueue[tuple[int, Any, BaseException | None]]


class Crew:
    """Its threads are started when they are first needed, and end with it. For one caller."""

    def __init__(self) -> None:
        self._inboxes: list[_Inbox] = []
        self._outbox: _Outbox = SimpleQueue()
        weakref.finalize(self, _dismiss, self._inboxes)

    def run(self, calls: Sequence[Callable[[], _T]]) -> list[_T]:
        """What each call returns. The first is done by the caller's own thread. When all are done,
        raises what one of them raised."""
        self._hire(len(calls) - 1)
        for i, call in enumerate(calls[1:]):
            self._inboxes[i].put((i + 1, call))
        done = [_attempt(0, calls[0])]
        done += [self._outbox.get() for _ in calls[1:]]
        for _, _, error in done:
            if error is not None:
                raise error
        return [result for _, result, _ in sorted(done, key=lambda one: one[0])]

    def _hire(self, count: int) -> None:
        while len(self._inboxes) < count:
            inbox: _Inbox = SimpleQueue()
            name = f"ramet-masks-{len(self._inboxes)}"
            # A daemon waits for its inbox when the interpreter ends.
            args = (inbox, self._outbox)
            threading.Thread(target=_work, args=args, name=name, daemon=True).start()
            self._inboxes.append(inbox)


def _work(inbox: _Inbox, outbox: _Outbox) -> None:
    while (asked := inbox.get()) is not None:
        outbox.put(_attempt(*asked))
        del asked  # what it holds should not live on until the next


def _attempt(at: int, call: Callable[[], Any]) -> tuple[int, Any, BaseException | None]:
    try:
        return at, call(), None
    except BaseException as error:
        return at, None, error


def _dismiss(inboxes: list[_Inbox]) -> None:
    for inbox in inboxes:
        inbox.put(None)
