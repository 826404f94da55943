"""What each instruction does to its stream when it runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from ..protocol.errors import BadInputError, ErrorInfo, MissingValueError, ProgramError, RametError
from ..protocol.meta import MetaInfo
from ..protocol.sampling import sampling_from
from .ahead import Ahead, rest
from .blocks import case_of, holds
from .cell import Cell
from .constraint import check_constraint
from .events import Entered, Event, Synced, TextDelta, Value, Warned
from .executor import Context, Explains
from .following import announce
from .instructions import (
    Bind,
    End,
    Fork,
    Gen,
    Instruction,
    Join,
    Match,
    Repeat,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    Switch,
    Sync,
    Text,
    Warm,
)
from .intake import Intake
from .stream import Stream
from .taken import Block, Resolved, Taken

Emit = Callable[[list[Event]], None]
Enter = Callable[[Stream, Taken, Sequence[Instruction]], None]
"""Has a stream run an arm or a turn of a block, and then the block's instruction again."""


class Steps:
    """Runs single instructions of one program. ``start`` sets a forked stream going."""

    def __init__(
        self,
        streams: Mapping[int, Stream],
        start: Callable[[Stream], None],
        enter: Enter,
        intake: Intake,
        emit: Emit,
        *,
        sampling: Mapping[str, Any],
        stream: bool,
        text_bytes: int,
    ) -> None:
        self.ahead = Ahead()
        self._streams = streams
        self._start = start
        self._enter = enter
        self._intake = intake
        self._emit = emit
        self._sampling = sampling
        self._stream = stream
        self.keeps_meta = False
        """Whether a block may report what was reported before."""
        self._text_bytes = 0
        self._max_text_bytes = text_bytes
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
            Switch: self._switch,
            Repeat: self._repeat,
        }

    async def run(self, stream: Stream, taken: Taken) -> None:
        """Raises what made the instruction fail."""
        instruction = taken.instruction
        self.ahead.tell(stream, taken)
        await self._handlers[type(instruction)](stream, instruction, taken)

    # --- text ---

    def _count(self, text: str) -> None:
        self._text_bytes += len(text) if text.isascii() else len(text.encode(errors="replace"))
        if self._text_bytes > self._max_text_bytes:
            raise ProgramError(f"the program's text exceeds {self._max_text_bytes} bytes")

    def _count_search(self, value: str, match: Match, texts: int) -> None:
        """Looking for texts in a value takes as long as reading it again for each."""
        if match == "contains":
            self._text_bytes += len(value) * texts
            self._count("")

    async def _texts(self, parts: Iterable[Resolved]) -> str:
        """The parts' text, waiting for the values they refer to."""
        texts: list[str] = []
        for part in parts:
            if isinstance(part, Cell):
                value = await part.get()
                if value is None:
                    raise MissingValueError(
                        f"no switch or repeat that could have bound {part.name!r} did",
                        param=part.name,
                    )
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
        params = taken.params or sampling_from(self._sampling, instruction.sampling)
        if params.constraint is not None:
            await check_constraint(params)
        context = _context(stream)
        announce(stream, context, self._sampling, self.ahead.remaining)
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
        if self._sampling.get("explain") if instruction.explain is None else instruction.explain:
            if not isinstance(context, Explains):
                raise BadInputError("explain: what runs this does not know its cache",
                                    param="explain")  # fmt: skip
            context.explain_next()
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
        rest(stream, stream.context)
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

    # --- blocks ---

    async def _switch(self, stream: Stream, instruction: Switch, taken: Taken) -> None:
        block = taken.block
        assert block is not None
        if block.turns:
            await self._leave(stream, taken)
            return
        value = await self._texts(taken.parts)
        self._count_search(value, instruction.match, len(instruction.cases))
        case = case_of(instruction, value)
        arm = instruction.default if case is None else instruction.cases[case]
        self._emit([Entered(stream.number, instruction.op, case)])
        self._enter(stream, taken, arm)

    async def _repeat(self, stream: Stream, instruction: Repeat, taken: Taken) -> None:
        block, until = taken.block, instruction.until
        assert block is not None
        over = block.turns == instruction.times
        if block.turns:
            await _all_ended(block)
            await asyncio.sleep(0)  # a loop that waits for nothing holds up nobody
            if until is not None and not over:
                value = await self._texts(self._intake.until(taken))
                self._count_search(value, until.match, len(until.texts))
                over = holds(until, value)
        if over:
            await self._leave(stream, taken)
            return
        turn = block.turns + 1
        self._emit([Entered(stream.number, instruction.op, turn=turn)])
        if instruction.count is not None:
            self._emit([Value(stream.number, -1, instruction.count, str(turn))])
        self._enter(stream, taken, instruction.body)

    async def _leave(self, stream: Stream, taken: Taken) -> None:
        block = taken.block
        assert block is not None
        await _all_ended(block)
        events: list[Event] = []
        for name, left in block.left.items():
            cell = block.scope.names.get(name)
            value = None if cell is None else await cell.get()
            left.set(value, None if cell is None else cell.meta)
            events.append(Value(stream.number, taken.instruction.op, name, value, left.meta))
        if events:
            self._emit(events)

    def _bound(
        self,
        stream: Stream,
        taken: Taken,
        value: str | list[Any],
        meta: MetaInfo | list[MetaInfo] | None = None,
    ) -> None:
        assert taken.cell is not None
        taken.cell.set(value, meta if self.keeps_meta else None)
        instruction = taken.instruction
        name = taken.cell.name or None
        self._emit([Value(stream.number, instruction.op, name, value, meta)])


def _context(stream: Stream) -> Context:
    assert stream.context is not None
    return stream.context


async def _all_ended(block: Block) -> None:
    """Wait for what an arm has forked. That one has failed is told where it is joined."""
    for end in block.ends:
        with contextlib.suppress(RametError):
            await end.get()
