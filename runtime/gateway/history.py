"""The contents of a stream's chat messages, for templates that change what they wrote before."""

from __future__ import annotations

from .request import IntArray

Segment = tuple[str, bool]
"""Literal text, and whether special tokens are recognised in it."""

Item = Segment | IntArray
"""Text that is still to be cut, or tokens exactly as the model generated them."""


class History:
    """Finished messages by number, and the one that is open."""

    __slots__ = ("_open", "messages")

    def __init__(self) -> None:
        self.messages: list[list[Item]] = []
        self._open: list[Item] | None = None

    @property
    def at_start(self) -> bool:
        """Whether a message is open and nothing is in it yet."""
        return self._open is not None and not self._open

    def open(self) -> None:
        self._open = []

    def add(self, item: Item) -> None:
        """Content of the open message; what stands outside of messages is not kept."""
        if self._open is not None and len(item):
            self._open.append(item)

    def pop_text(self) -> Segment | None:
        """Take back the last piece, if it is text."""
        if self._open and isinstance(last := self._open[-1], tuple):
            self._open.pop()
            return last
        return None

    def cut(self, count: int) -> None:
        """Take back the last ``count`` characters of the open message, all of them text; those that
        it does not have were put there by the tokenizer."""
        while count > 0 and (last := self.pop_text()) is not None:
            text, special = last
            self.add((text[:-count], special))
            count -= len(text)

    def close(self) -> None:
        assert self._open is not None
        self.messages.append(self._open)
        self._open = None

    def fork(self) -> History:
        child = History()
        child.messages = [*self.messages]
        child._open = None if self._open is None else [*self._open]
        return child
