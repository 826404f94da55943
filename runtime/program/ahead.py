"""What of a program is still to come, as far as it was sent."""

from __future__ import annotations

from itertools import islice
from typing import TypeGuard

from .blocks import MOST_READS, is_read
from .executor import Context, LooksAhead
from .instructions import Fork, Repeat
from .stream import Stream
from .taken import Taken


def looks_ahead(context: Context | None) -> TypeGuard[LooksAhead]:
    """Whether a context can use hints. (To ask for the protocol takes as long as all else that is
    done here.)"""
    return hasattr(context, "expect") and hasattr(context, "rest")


def may_read(stream: Stream) -> bool:
    """Whether this stream, or one that it will fork, may have its text read again. Of one that is
    not closed that cannot be known."""
    return reads_of(stream, 0)


def reads_of(stream: Stream, skip: int) -> bool:
    """The same, of what comes behind its next ``skip`` instructions."""
    return stream.open or any(
        taken.to_come or isinstance(taken.instruction, Fork)
        for taken in islice(stream.queue, skip, None)
    )


def _most(taken: Taken) -> int:
    """How often the model is asked for an instruction that begins, at most: of a block, what it
    has not entered yet."""
    block, instruction = taken.block, taken.instruction
    if block is None:
        return int(is_read(instruction))
    if isinstance(instruction, Repeat):
        return min((instruction.times - block.turns) * block.reads, MOST_READS)
    return block.reads if block.turns == 0 else 0


class Ahead:
    """Counts the generations and selections that were taken in and have not begun. Of what is
    not decided yet it counts the most there can be: a switch as its longest arm, a repeat as all
    turns that it has left."""

    def __init__(self) -> None:
        self._remaining = 0

    @property
    def remaining(self) -> int:
        return min(self._remaining, MOST_READS)

    def add(self, taken: Taken) -> None:
        taken.to_come = _most(taken)
        self._remaining += taken.to_come

    def drop(self, taken: Taken) -> None:
        """It begins, or never will."""
        self._remaining -= taken.to_come
        taken.to_come = 0

    def tell(self, stream: Stream, taken: Taken) -> None:
        """An instruction begins: tell the stream's context what will come after it."""
        self.drop(taken)
        context = stream.context
        if is_read(taken.instruction) and looks_ahead(context):
            context.expect(self.remaining, may_read(stream))


def rest(stream: Stream, context: Context | None) -> None:
    """Let a context know if nobody reads its text again."""
    if looks_ahead(context) and not may_read(stream):
        context.rest()
