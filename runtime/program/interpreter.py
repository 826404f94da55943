"""Runs a program over an executor: streams at the same time, each one's instructions in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ..protocol.errors import AbortedError, ErrorInfo, GrammarError, ProgramError, RametError
from .events import Done, Failed
from .executor import Executor
from .instructions import (
    ROOT,
    End,
    Fork,
    Instruction,
    Join,
)
from .intake import Intake
from .limits import Limits
from .steps import Emit, Steps
from .stream import Stream
from .taken import Taken

log = logging.getLogger(__name__)


class Interpreter:
    """One running program.

    ``emit`` is called on the loop with events in order. A child stream's deltas begin after the
    fork: its text is the parent's text at the fork and its own deltas. An instruction that fails
    ends its stream with one `Failed`; streams it never got to start fail with the same error, and
    so does whatever waits on their values. Not thread-safe: all happens on one asyncio loop.
    """

    def __init__(
        self,
        executor: Executor,
        emit: Emit,
        *,
        program: int,
        sampling: Mapping[str, Any],
        args: Mapping[str, Any],
        stream: bool,
        limits: Limits,
        cache_salt: str | None = None,
    ) -> None:
        self._executor = executor
        self._emit = emit
        self._program = program
        self._limits = limits
        self._cache_salt = cache_salt
        self._intake = Intake.of(args, limits)
        self._streams: dict[int, Stream] = {ROOT: Stream(ROOT)}
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = False
        self._closed = False
        self._abort: ErrorInfo | None = None
        self._over = asyncio.Event()
        self._steps = Steps(
            self._streams,
            self._start,
            self._enter,
            self._intake,
            emit,
            sampling=sampling,
            stream=stream,
            text_bytes=limits.text_bytes,
        )

    # --- from outside ---

    def feed(self, instructions: Sequence[Instruction], closed: bool) -> None:
        """Take more instructions in; with ``closed``, no more will come.

        Raises `ProgramError` for what no program may hold; the program is over then (`Done`).
        """
        if self._abort is not None:
            return
        try:
            if self._closed and instructions:
                raise ProgramError("the program is closed; it takes no more instructions")
            for instruction in instructions:
                self._put(self._intake.take(instruction))
        except ProgramError as error:
            self._stop(ErrorInfo.of(error))
            raise
        if closed and not self._closed:
            self._closed = True
            for stream in self._streams.values():
                stream.close()
            self._check_over()

    async def run(self) -> None:
        """Run until closed and finished, or cancelled. The last event is always `Done`."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._limits.seconds, self._expire)
        root = self._streams[ROOT]
        try:
            if self._abort is None:
                try:
                    root.context = self._executor.open(self._program, self._cache_salt)
                except RametError as error:
                    self._stop(ErrorInfo.of(error))
                else:
                    self._start(root)
                    await self._over.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        finally:
            timer.cancel()
            await self._clean_up()
            self._emit([Done(self._abort)])

    def cancel(self, why: str | None = None) -> None:
        """Drop what has not run and abort what runs. `run` then ends soon."""
        self._stop(ErrorInfo.of(AbortedError(why or "the program was cancelled")))

    # --- streams ---

    def _put(self, taken: Taken) -> None:
        instruction = taken.instruction
        stream = self._streams[instruction.stream]
        self._expect(taken)
        if stream.error is not None:
            self._skip(taken, stream.error)
            return
        self._steps.ahead.add(taken)
        self._steps.keeps_meta |= taken.block is not None
        stream.put(taken)
        if isinstance(instruction, Join):
            for number in instruction.children:
                self._streams[number].close()
        elif isinstance(instruction, End):
            stream.close()

    def _expect(self, taken: Taken) -> None:
        """Make the streams that it forks."""
        if isinstance(taken.instruction, Fork):
            for number in taken.instruction.children:
                self._streams[number] = Stream(number)

    def _enter(self, stream: Stream, taken_block: Taken, arm: Sequence[Instruction]) -> None:
        """Have a stream run an arm or a turn of a block, and then the block's instruction again.
        Raises `ProgramError` for too much."""
        block = taken_block.block
        assert block is not None
        ahead: list[Taken] = []
        for taken in self._intake.enter(taken_block, arm):
            if taken.instruction.stream == stream.number:
                self._expect(taken)
                self._steps.ahead.add(taken)
                ahead.append(taken)
            else:
                self._put(taken)
        forked = [self._streams[number] for number in block.scopes if number != stream.number]
        for child in forked:
            child.close()
        block.ends = tuple(child.finished for child in forked)
        self._steps.ahead.add(taken_block)
        stream.put_first([*ahead, taken_block])

    def _start(self, stream: Stream) -> None:
        self._started = stream.started = True
        task = asyncio.get_running_loop().create_task(self._run_stream(stream))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("program %d: a stream broke", self._program, exc_info=error)
            self._stop(ErrorInfo.of(error))
        self._check_over()

    def _check_over(self) -> None:
        if self._started and self._closed and not self._tasks:
            self._over.set()

    async def _run_stream(self, stream: Stream) -> None:
        try:
            while (taken := await stream.next()) is not None:
                instruction = taken.instruction
                try:
                    await self._steps.run(stream, taken)
                except Exception as error:
                    if not isinstance(error, RametError):
                        log.error("program %d: %r", self._program, instruction, exc_info=error)
                    self._fail(stream, taken, _located(error, instruction))
                    return
            stream.finished.set(None)
        finally:
            _release(stream)

    def _fail(self, stream: Stream, taken: Taken | None, error: ErrorInfo) -> None:
        """End the stream here: nothing after this instruction will happen."""
        op = taken.instruction.op if taken is not None else -1
        stream.error = error
        self._emit([Failed(stream.number, op, error)])
        stream.finished.fail(error)
        if taken is not None:
            self._skip(taken, error)
        while stream.queue:
            self._skip(stream.queue.popleft(), error)

    def _skip(self, taken: Taken, error: ErrorInfo) -> None:
        """An instruction that will not happen: nothing it would have made will ever be there."""
        self._steps.ahead.drop(taken)
        taken.fail(error)
        if isinstance(taken.instruction, Fork):
            for number in taken.instruction.children:
                child = self._streams[number]
                if not child.started and child.error is None:
                    self._fail(child, None, error)

    def _expire(self) -> None:
        message = f"the program ran longer than {self._limits.seconds:g} seconds"
        self._stop(ErrorInfo.of(AbortedError(message)))

    def _stop(self, error: ErrorInfo) -> None:
        if self._abort is None and not self._over.is_set():
            self._abort = error
            self._over.set()

    async def _clean_up(self) -> None:
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            for stream in self._streams.values():
                _release(stream)


def _release(stream: Stream) -> None:
    """Close the stream's context, once."""
    if stream.context is not None:
        context, stream.context = stream.context, None
        context.close()


def _located(error: Exception, instruction: Instruction) -> ErrorInfo:
    """The error as data, saying which source line asked for it unless it says so already."""
    info = ErrorInfo.of(error)
    where = info.where or instruction.line or None
    if info.kind == GrammarError.kind and info.where and instruction.line:
        where = f"{info.where}, {instruction.line}"  # inside the spec, and in the program
    return ErrorInfo(info.kind, info.message, where, info.param)
