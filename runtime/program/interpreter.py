"""Runs a program over an executor: streams at the same time, each one's instructions in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from ..protocol.errors import AbortedError, BadInputError, ErrorInfo, ProgramError, RametError
from ..protocol.meta import MetaInfo
from ..protocol.sampling import sampling_from
from .cell import Cell
from .constraint import check_constraint
from .events import Done, Event, Failed, Synced, TextDelta, Value, Warned
from .executor import Context, Executor
from .instructions import (
    ROOT,
    Bind,
    End,
    Fork,
    Gen,
    Instruction,
    Join,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    Sync,
    Text,
    Warm,
)
from .intake import Intake, Resolved, Taken
from .limits import Limits
from .stream import Stream

log = logging.getLogger(__name__)

Emit = Callable[[list[Event]], None]


class Interpreter:
    """One running program.

    ``emit`` is called on the loop with events in order. A child stream's deltas begin after the
    fork: its text is the parent's text at the fork and its own deltas. An instruction that fails ends its
    stream with one `Failed`; streams it never got to start fail with the same error, and so does
    whatever waits on their values. Not thread-safe: everything happens on one asyncio loop.
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
        self._sampling = sampling
        self._stream = stream
        self._limits = limits
        self._cache_salt = cache_salt
        self._intake = Intake(args, limits)
        self._streams: dict[int, Stream] = {ROOT: Stream(ROOT)}
        self._tasks: set[asyncio.Task[None]] = set()
        self._text_bytes = 0
        self._started = False
        self._closed = False
        self._abort: ErrorInfo | None = None
        self._over = asyncio.Event()
        self._handlers: dict[type, Callable[[Stream, Any, Taken], Awaitable[None]]] = {
            Text: self._text,
            Gen: self._gen,
            Select: self._select,
            RoleBegin: self._role_begin,
            RoleEnd: self._role_end,
            Fork: self._fork,
            Join: self._join,
            Bind: self._bind,
            ScopeBegin: self._scope_begin,
            ScopeEnd: self._scope_end,
            Sync: self._sync,
            Warm: self._warm,
            End: self._end,
        }

    # --- from outside ---

    def feed(self, instructions: Sequence[Instruction], closed: bool) -> None:
        """Take more instructions in; with ``closed``, no more will come.

        Raises `ProgramError` for what no program may hold; the program is then over, as `Done` says.
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

    def cancel(self) -> None:
        """Drop what has not run and abort what runs. `run` then ends soon."""
        self._stop(ErrorInfo.of(AbortedError("the program was cancelled")))

    # --- streams ---

    def _put(self, taken: Taken) -> None:
        instruction = taken.instruction
        stream = self._streams[instruction.stream]
        children = instruction.children if isinstance(instruction, Fork) else ()
        for number in children:
            self._streams[number] = Stream(number)
        if stream.error is not None:
            self._skip(taken, stream.error)
            return
        stream.put(taken)
        if isinstance(instruction, Join):
            for number in instruction.children:
                self._streams[number].close()
        elif isinstance(instruction, End):
            stream.close()

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
                    await self._handlers[type(instruction)](stream, instruction, taken)
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

    # --- text ---

    def _count(self, text: str) -> None:
        self._text_bytes += len(text) if text.isascii() else len(text.encode(errors="replace"))
        if self._text_bytes > self._limits.text_bytes:
            raise ProgramError(f"the program's text exceeds {self._limits.text_bytes} bytes")

    async def _texts(self, parts: Iterable[Resolved]) -> str:
        """The parts' text, waiting for the values they refer to."""
        texts: list[str] = []
        for part in parts:
            if isinstance(part, Cell):
                value = await part.get()
                if not isinstance(value, str):
                    raise ProgramError(
                        f"variable {part.name!r} holds a list; a reference needs one text"
                    )
            elif isinstance(part, ErrorInfo):
                raise part.exception()
            else:
                value = part
            self._count(value)
            texts.append(value)
        return "".join(texts) if len(texts) != 1 else texts[0]

    def _grow(self, stream: Stream, text: str, op: int = -1) -> None:
        if text:
            stream.add(text)
            if self._stream:
                self._emit([TextDelta(stream.number, text, op)])

    def _warn(self, stream: Stream, context: Context) -> None:
        for name, message in context.warnings():
            self._emit([Warned(stream.number, name, message)])

    # --- instructions, one method each ---

    async def _text(self, stream: Stream, _: Text, taken: Taken) -> None:
        text = await self._texts(taken.parts)
        _context(stream).append(text)
        self._grow(stream, text)

    async def _role_begin(self, stream: Stream, instruction: RoleBegin, _: Taken) -> None:
        context = _context(stream)
        marker = context.role_begin(instruction.role)
        self._count(marker)
        self._grow(stream, marker)
        stream.begin_role(instruction.role)
        self._warn(stream, context)

    async def _role_end(self, stream: Stream, instruction: RoleEnd, _: Taken) -> None:
        context = _context(stream)
        marker = context.role_end(instruction.role)
        self._count(marker)
        stream.end_role()
        self._grow(stream, marker)
        self._warn(stream, context)

    async def _gen(self, stream: Stream, instruction: Gen, taken: Taken) -> None:
        params = sampling_from(self._sampling, instruction.sampling)
        check_constraint(params)
        context = _context(stream)
        sent: list[str] = []

        def on_delta(text: str, meta: MetaInfo | None) -> None:
            if text or meta is not None:
                sent.append(text)
                self._emit([TextDelta(stream.number, text, instruction.op, meta)])

        results = await context.gen(params, instruction.name, on_delta if self._stream else None)
        text = results[0].text
        self._count(text)
        stream.add(text)
        if self._stream and (rest := text[len("".join(sent)) :]):
            self._emit([TextDelta(stream.number, rest, instruction.op)])
        self._warn(stream, context)
        if params.n == 1:
            value, meta = text, results[0].meta
        else:
            value, meta = [r.text for r in results], [r.meta for r in results]
        self._bound(stream, taken, value, meta)

    async def _select(self, stream: Stream, instruction: Select, taken: Taken) -> None:
        if not instruction.choices:
            raise BadInputError("select needs at least one choice", param="choices")
        choices = [await self._texts(parts) for parts in taken.choices]
        context = _context(stream)
        result = await context.select(
            choices, instruction.method, instruction.boundary, instruction.name
        )
        text = choices[result.index]
        self._count(text)
        self._grow(stream, text, instruction.op)
        self._warn(stream, context)
        self._bound(stream, taken, text, result.meta)

    async def _bind(self, stream: Stream, _: Bind, taken: Taken) -> None:
        self._bound(stream, taken, await self._texts(taken.parts))

    async def _scope_begin(self, stream: Stream, instruction: ScopeBegin, _: Taken) -> None:
        stream.begin_scope(instruction.name)

    async def _scope_end(self, stream: Stream, _: ScopeEnd, taken: Taken) -> None:
        self._bound(stream, taken, stream.end_scope())

    async def _fork(self, stream: Stream, instruction: Fork, _: Taken) -> None:
        children = [self._streams[number] for number in instruction.children]
        for child in children:
            stream.start_child(child)
        for child in children:
            self._start(child)

    async def _join(self, stream: Stream, instruction: Join, taken: Taken) -> None:
        children = [self._streams[number] for number in instruction.children]
        for child in children:
            await child.finished.get()
        if instruction.mode == "concate_and_append":
            for child in children:
                text = child.new_text()
                self._count(text)
                _context(stream).append(text)
                self._grow(stream, text)
        for gather in taken.gathers:
            values = [await cell.get() if cell else None for cell in gather.sources]
            gather.target.set(values)
            self._emit([Value(stream.number, instruction.op, gather.name, values)])

    async def _sync(self, stream: Stream, instruction: Sync, _: Taken) -> None:
        want = instruction.want
        text = stream.text() if want == "text" else None
        messages = [*stream.messages] if want == "messages" else None
        self._emit([Synced(instruction.op, text, messages)])

    async def _warm(self, stream: Stream, instruction: Warm, _: Taken) -> None:
        context = _context(stream)
        await context.warm()
        self._warn(stream, context)
        if instruction.op >= 0:
            self._emit([Synced(instruction.op)])

    async def _end(self, stream: Stream, _: End, __: Taken) -> None:
        """Taking this in closed the stream; its context goes when the queue is empty."""

    def _bound(
        self,
        stream: Stream,
        taken: Taken,
        value: str | list[Any],
        meta: MetaInfo | list[MetaInfo] | None = None,
    ) -> None:
        assert taken.cell is not None
        taken.cell.set(value)
        instruction = taken.instruction
        name = taken.cell.name or None
        self._emit([Value(stream.number, instruction.op, name, value, meta)])


def _context(stream: Stream) -> Context:
    assert stream.context is not None
    return stream.context


def _release(stream: Stream) -> None:
    """Close the stream's context, once."""
    if stream.context is not None:
        context, stream.context = stream.context, None
        context.close()


def _located(error: Exception, instruction: Instruction) -> ErrorInfo:
    """The error as data, saying which source line asked for it unless it says so already."""
    info = ErrorInfo.of(error)
    where = info.where or instruction.line or None
    return ErrorInfo(info.kind, info.message, where, info.param)
