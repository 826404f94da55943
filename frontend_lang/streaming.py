"""Reading a running program's text piece by piece."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any, NamedTuple, cast

from ramet.runtime.program.events import TextDelta

from .branch import Branch, Made
from .recording import missing
from .run import Run, as_dicts


class StreamEvent(NamedTuple):
    """New text of one branch. ``path``: which child of which child of the root (``()``) it is.
    ``variable``: what it belongs to, None for literals, markers and unnamed generations."""

    path: tuple[int, ...]
    variable: str | None
    delta: str


Piece = tuple[str, dict[str, Any]]
Check = Callable[[], Any]
Steps = Generator[Check, Any, None]


class _Pieces:
    """Where an iterator stands. Its generator yields what to wait for and is sent the answer, so
    that the blocking and the asyncio iterator share every step."""

    def __init__(self, run: Run, branch: Branch, var: str | None) -> None:
        self.run = run
        self.branch = branch
        self.var = var
        self.out: list[Piece] = []

    def steps(self) -> Steps:
        if self.var is not None:
            yield from self._variable(self.var)
        elif not self.run.stream or self._unknown_start():
            op = self.run.sync(self.branch, "text")
            yield from self._synced(op)
        else:
            if self.branch.start_op >= 0:
                yield from self._synced(self.branch.start_op)
            lineage = self.branch.lineage(1 << 62)
            yield from self._deltas(None, lambda: self._ended(lineage))

    def _unknown_start(self) -> bool:
        """Of a compiled program's branch it is not told what it was forked from."""
        return self.branch.parent is not None and self.branch.start_op < 0

    def _synced(self, op: int) -> Steps:
        lineage = self.branch.lineage(op)
        synced = yield lambda: self.run.store.reply(op, lineage)
        if synced.text:
            self.out.append((synced.text, {}))

    def _ended(self, lineage: list[tuple[int, int]]) -> bool:
        """Whether the branch's text is complete; raises why it never will be."""
        store, op = self.run.store, self.branch.text_op
        if (self.run.closed or self.branch.ended) and op > self.branch.last_op:
            return store.reply(op, lineage) is not None
        if store.done or store.failures:
            store.check(lineage)
        return False

    def _variable(self, var: str) -> Steps:
        run = self.run
        yield lambda: True if var in self.branch.names or run.closed else None
        binding = self.branch.names.get(var)
        if binding is None:
            if run.failure is not None:
                raise run.failure
            if run.store.fatal is not None:
                raise run.store.fatal.exception()
            raise missing(self.branch, var)
        if isinstance(binding, Made) and binding.streams and run.stream:
            pending = run.pending(binding)
            yield from self._deltas(binding, lambda: pending() is not None)
            return
        if isinstance(binding, Made):
            value = yield run.pending(binding)
            text, meta = value.value, value.meta
            if not binding.gathered:  # of several samples, the one that the text goes on with
                text, meta = _first(text), _first(meta)
            self.out.append((_joined(text), as_dicts(meta)))
            return
        # What Python set or a join gathered: its parts may wait, one by one.
        self.out.append((_joined(run.read(self.branch, var, binding)), {}))

    def _deltas(self, binding: Made | None, ended: Callable[[], bool]) -> Steps:
        stream = self.branch.stream if binding is None else binding.branch.stream
        position = 0

        def ready() -> tuple[list[TextDelta], bool] | None:
            deltas = self.run.store.by_stream.get(stream, ())
            if position < len(deltas):
                return list(deltas[position:]), False
            return ([], True) if ended() else None

        while True:
            deltas, over = yield ready
            position += len(deltas)
            for delta in deltas:
                if binding is None or delta.op == binding.op:
                    self.out.append((delta.text, as_dicts(delta.meta)))
            if over:
                return

    def take(self) -> list[Piece]:
        out, self.out = self.out, []
        return out


def _first(value: Any) -> Any:
    return cast("list[Any]", value)[0] if isinstance(value, list) else value


def _joined(value: Any) -> str:
    return "".join(str(item) for item in value) if isinstance(value, list) else str(value)  # pyright: ignore


def text_iter(run: Run, branch: Branch, var: str | None) -> Iterator[str]:
    """See `State.text_iter`."""
    pieces = _Pieces(run, branch, var)
    steps = pieces.steps()
    answer: Any = None
    while True:
        try:
            check = steps.send(answer)
        except StopIteration:
            break
        yield from (text for text, _ in pieces.take() if text)
        answer = _wait(run, check)
    yield from (text for text, _ in pieces.take() if text)


async def text_async_iter(
    run: Run, branch: Branch, var: str | None, return_meta_data: bool
) -> AsyncIterator[Any]:
    """See `State.text_async_iter`."""
    pieces = _Pieces(run, branch, var)
    steps = pieces.steps()
    answer: Any = None
    going = True
    while going:
        try:
            check = steps.send(answer)
        except StopIteration:
            check, going = None, False
        for text, meta in pieces.take():
            if return_meta_data:
                yield text, meta
            elif text:
                yield text
        if check is not None:
            answer = await run.wait_async(check)


def events(run: Run) -> Iterator[StreamEvent]:
    """See `State.events`."""
    position = 0
    while True:
        deltas = _wait(run, lambda p=position: _more(run, p))
        if not deltas:
            break
        position += len(deltas)
        yield from (_event(run, delta) for delta in deltas)


async def async_events(run: Run) -> AsyncIterator[StreamEvent]:
    """See `State.async_events`."""
    position = 0
    while True:
        deltas = await run.wait_async(lambda p=position: _more(run, p))
        if not deltas:
            break
        position += len(deltas)
        for delta in deltas:
            yield _event(run, delta)


def _more(run: Run, position: int) -> list[TextDelta] | None:
    """Deltas from a position on; empty at the end. Raises what ended the program early."""
    store = run.store
    if position < len(store.deltas):
        return store.deltas[position:]
    if not store.done:
        return None
    if run.failure is not None:
        raise run.failure
    if store.fatal is not None:
        raise store.fatal.exception()
    if store.failures:
        raise store.failures[0].error.exception()
    return []


def _event(run: Run, delta: TextDelta) -> StreamEvent:
    label = run.labels.get(delta.op)
    return StreamEvent(run.branches[delta.stream].path, label, delta.text)


def _wait(run: Run, check: Check) -> Any:
    try:
        return run.wait(check)
    except KeyboardInterrupt:
        run.abort()
        raise
