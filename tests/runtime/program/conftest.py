"""A scripted executor: contexts that only hold text, and generations that are a function of it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from ramet.runtime.program.events import Done, Event, Failed, Synced, TextDelta, Value
from ramet.runtime.program.executor import GenResult, SelectResult
from ramet.runtime.program.interpreter import Interpreter
from ramet.runtime.program.limits import Limits
from ramet.runtime.protocol import MetaInfo, ProgramError, SamplingParams


def answer(text: str, sample: int = 0) -> str:
    """A short text that depends on all that came before it."""
    return f"<{hashlib.sha256(f'{text}/{sample}'.encode()).hexdigest()[:6]}>"


@dataclass
class FakeExecutor:
    """Counts what is open; ``script`` may give another answer or raise."""

    script: Callable[[str, str | None], str] | None = None
    turns: Callable[[], int] = lambda: 1
    contexts: list[FakeContext] = field(default_factory=list)
    running: int = 0
    peak: int = 0
    aborted: int = 0

    def open(self, program: int, cache_salt: str | None = None) -> FakeContext:
        return FakeContext(self)

    @property
    def leaked(self) -> int:
        return sum(context.closed != 1 for context in self.contexts)


class FakeContext:
    def __init__(self, executor: FakeExecutor, text: str = "") -> None:
        self.executor = executor
        self.text = text
        self.closed = 0
        self.told: list[tuple[str, str]] = []
        executor.contexts.append(self)

    def append(self, text: str) -> None:
        assert not self.closed
        self.text += text

    def role_begin(self, role: str) -> str:
        if role == "nobody":
            raise ProgramError("no such role")
        self.text += f"[{role}]"
        return f"[{role}]"

    def role_end(self, role: str) -> str:
        self.text += f"[/{role}]"
        self.told.append(("ended", role))
        return f"[/{role}]"

    def fork(self) -> FakeContext:
        assert not self.closed
        return FakeContext(self.executor, self.text)

    async def _work(self) -> None:
        executor = self.executor
        executor.running += 1
        executor.peak = max(executor.peak, executor.running)
        try:
            for _ in range(executor.turns()):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            executor.aborted += 1
            raise
        finally:
            executor.running -= 1

    async def gen(
        self, sampling: SamplingParams, name: str | None, on_delta: Any
    ) -> list[GenResult]:
        await self._work()
        script = self.executor.script
        texts = [
            script(self.text, name) if script else answer(self.text, i) for i in range(sampling.n)
        ]
        if on_delta is not None:
            for letter in texts[0]:
                on_delta(letter, None)
                await asyncio.sleep(0)
        self.append(texts[0])
        return [GenResult(text, MetaInfo(id=str(name))) for text in texts]

    async def select(
        self, choices: Sequence[str], method: str, boundary: str, name: str | None
    ) -> SelectResult:
        await self._work()
        index = max(range(len(choices)), key=lambda i: answer(self.text + choices[i]))
        self.append(choices[index])
        return SelectResult(index, MetaInfo(id=str(name)))

    async def warm(self) -> None:
        await self._work()

    def warnings(self) -> list[tuple[str, str]]:
        told, self.told = self.told, []
        return told

    def close(self) -> None:
        self.closed += 1


@dataclass
class Outcome:
    """The events of a finished run, and what can be read from them."""

    events: list[Event]
    executor: FakeExecutor

    @property
    def done(self) -> Done:
        assert isinstance(self.events[-1], Done)
        assert sum(isinstance(event, Done) for event in self.events) == 1
        return self.events[-1]

    def value(self, op: int, name: str | None = None) -> Any:
        found = [e for e in self.events if isinstance(e, Value) and e.op == op]
        if name is not None:
            found = [e for e in found if e.name == name]
        assert len(found) == 1, found
        return found[0].value

    def synced(self, op: int) -> Synced:
        (found,) = [e for e in self.events if isinstance(e, Synced) and e.op == op]
        return found

    def failed(self) -> dict[int, Failed]:
        return {e.stream: e for e in self.events if isinstance(e, Failed)}

    def streamed(self, stream: int) -> str:
        return "".join(
            e.text for e in self.events if isinstance(e, TextDelta) and e.stream == stream
        )


class Runs:
    """Runs programs over a fake executor, feeding them in the pieces asked for."""

    def __init__(self) -> None:
        self.executor = FakeExecutor()

    def start(
        self,
        *,
        args: dict[str, Any] | None = None,
        sampling: dict[str, Any] | None = None,
        stream: bool = True,
        limits: Limits | None = None,
    ) -> tuple[Interpreter, list[Event]]:
        events: list[Event] = []
        interpreter = Interpreter(
            self.executor,
            events.extend,
            program=1,
            sampling=sampling or {},
            args=args or {},
            stream=stream,
            limits=limits or Limits(),
        )
        return interpreter, events

    async def whole(self, *instructions: Any, **options: Any) -> Outcome:
        interpreter, events = self.start(**options)
        interpreter.feed(instructions, True)
        await interpreter.run()
        return Outcome(events, self.executor)

    async def pieces(self, pieces: Sequence[Sequence[Any]], turns: int, **options: Any) -> Outcome:
        interpreter, events = self.start(**options)
        task = asyncio.create_task(interpreter.run())
        for piece in pieces:
            interpreter.feed(piece, False)
            for _ in range(turns):
                await asyncio.sleep(0)
        interpreter.feed((), True)
        await task
        return Outcome(events, self.executor)


@pytest.fixture
def runs() -> Runs:
    return Runs()


@pytest.fixture(scope="session")
def new_runs() -> type[Runs]:
    """For property tests, which need a fresh one an example."""
    return Runs


@pytest.fixture
def answered() -> Callable[..., str]:
    return answer
