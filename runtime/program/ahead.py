"""What of a program is still to come, as far as it was sent."""

from __future__ import annotations

from .executor import Context, LooksAhead
from .instructions import Fork, Gen, Instruction, Select, Warm
from .intake import Taken
from .stream import Stream


def _reads(instruction: Instruction) -> bool:
    """Whether an instruction has its stream's text read by the model."""
    return isinstance(instruction, Gen | Select | Warm)


def may_read(stream: Stream) -> bool:
    """Whether this stream, or one that it will fork, may have its text read again. Of one that is
    not closed that cannot be known."""
    return stream.open or any(
        _reads(taken.instruction) or isinstance(taken.instruction, Fork) for taken in stream.queue
    )


class Ahead:
    """Counts the generations and selections that were taken in and have not begun."""

    def __init__(self) -> None:
        self.remaining = 0

    def add(self, taken: Taken) -> None:
        if _reads(taken.instruction):
            taken.to_come = True
            self.remaining += 1

    def drop(self, taken: Taken) -> None:
        """It begins, or never will."""
        if taken.to_come:
            taken.to_come = False
            self.remaining -= 1

    def tell(self, stream: Stream, taken: Taken) -> None:
        """An instruction begins: tell the stream's context what will come after it."""
        self.drop(taken)
        context = stream.context
        if _reads(taken.instruction) and isinstance(context, LooksAhead):
            context.expect(self.remaining, may_read(stream))


def rest(stream: Stream, context: Context | None) -> None:
    """Let a context know if nobody reads its text again."""
    if isinstance(context, LooksAhead) and not may_read(stream):
        context.rest()
