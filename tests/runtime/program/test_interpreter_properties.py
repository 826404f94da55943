"""Random programs: the same texts however they are fed and interleaved, and nothing leaks."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from ramet.runtime.program.events import Done, Synced, TextDelta, Value
from ramet.runtime.program.instructions import (
    Bind,
    Fork,
    Gen,
    Join,
    Ref,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    Sync,
    Text,
)


class Writer:
    """Writes a random program that follows the rules, remembering what is bound and open."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.instructions: list[Any] = []
        self.ops = 0
        self.names: dict[int, set[str]] = {0: set()}
        self.children: dict[int, list[int]] = {0: []}
        self.role: dict[int, bool] = {0: False}
        self.scopes: dict[int, list[str]] = {0: []}
        self.live = [0]

    def op(self) -> int:
        self.ops += 1
        return self.ops

    def write(self, length: int) -> list[Any]:
        moves = [self.text, self.text, self.gen, self.gen, self.select, self.bind]
        moves += [self.fork, self.join, self.role_move, self.scope]
        for _ in range(length):
            self.dice.choice(moves)(self.dice.choice(self.live))
        for stream in self.live:
            self.add(Sync(stream=stream, op=self.op(), want="text"))
        return self.instructions

    def add(self, instruction: Any) -> None:
        self.instructions.append(instruction)

    def parts(self) -> tuple[Any, ...]:
        known = [(s, n) for s in self.names for n in sorted(self.names[s])]
        parts: list[Any] = [self.dice.choice(["a", "bc ", "é", "\n"])]
        if known and self.dice.random() < 0.5:
            parts.append(Ref(*self.dice.choice(known)))
        return tuple(parts)

    def name(self, stream: int) -> str:
        name = self.dice.choice("xyz")
        self.names[stream].add(name)
        return name

    def text(self, stream: int) -> None:
        self.add(Text(stream=stream, parts=self.parts()))

    def gen(self, stream: int) -> None:
        self.add(Gen(stream=stream, op=self.op(), name=self.name(stream)))

    def select(self, stream: int) -> None:
        choices = (self.parts(), self.parts())
        self.add(Select(stream=stream, op=self.op(), choices=choices, name=self.name(stream)))

    def bind(self, stream: int) -> None:
        parts = self.parts()
        self.add(Bind(stream=stream, op=self.op(), parts=parts, name=self.name(stream)))

    def fork(self, stream: int) -> None:
        if len(self.names) > 12:
            return
        new = tuple(range(len(self.names), len(self.names) + self.dice.randint(1, 3)))
        for child in new:
            self.names[child] = set(self.names[stream])
            self.role[child] = self.role[stream]
            self.children[child], self.scopes[child] = [], []
        self.children[stream] += new
        self.live += new
        self.add(Fork(stream=stream, children=new))

    def join(self, stream: int) -> None:
        if not self.children[stream]:
            return
        mode = self.dice.choice(["gather_variable", "concate_and_append"])
        children = tuple(self.children[stream])
        for child in children:
            self.live.remove(child)
        self.children[stream] = []
        self.add(Join(stream=stream, op=self.op(), children=children, mode=mode))
        # A gathered name holds a list, which no reference may use: none is made to it.

    def role_move(self, stream: int) -> None:
        kind = RoleEnd if self.role[stream] else RoleBegin
        self.add(kind(stream=stream, role="user"))
        self.role[stream] = not self.role[stream]

    def scope(self, stream: int) -> None:
        if self.scopes[stream]:
            name = self.scopes[stream].pop()
            self.names[stream].add(name)
            self.add(ScopeEnd(stream=stream, op=self.op(), name=name))
        else:
            self.scopes[stream].append("s")
            self.add(ScopeBegin(stream=stream, name="s"))


def _facts(outcome: Any) -> dict[Any, Any]:
    """All that a reader can see, without the order in which streams took turns."""
    seen: dict[Any, Any] = {}
    for event in outcome.events:
        if isinstance(event, Value):
            seen["value", event.op, event.name] = event.value
        elif isinstance(event, Synced):
            seen["text", event.op] = event.text
        elif isinstance(event, TextDelta):
            key = ("deltas", event.stream)
            seen[key] = seen.get(key, "") + event.text
        elif not isinstance(event, Done):
            seen["failed", getattr(event, "stream", None), getattr(event, "op", None)] = event
    return seen


def _pieces(instructions: list[Any], dice: random.Random) -> list[list[Any]]:
    pieces: list[list[Any]] = [[]]
    for instruction in instructions:
        if dice.random() < 0.3:
            pieces.append([])
        pieces[-1].append(instruction)
    return pieces


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32), length=st.integers(1, 40))
def test_feeding_and_interleaving_change_nothing(new_runs, seed, length):
    dice = random.Random(seed)
    instructions = Writer(dice).write(length)

    async def all_ways() -> None:
        whole = await new_runs().whole(*instructions)
        assert whole.executor.leaked == 0
        assert not whole.failed()
        for _ in range(2):
            runs = new_runs()
            runs.executor.turns = lambda: dice.randint(0, 7)
            lazy = await runs.pieces(_pieces(instructions, dice), dice.randint(0, 5))
            assert _facts(lazy) == _facts(whole)
            assert lazy.executor.leaked == 0
            assert lazy.done.error is None

    asyncio.run(all_ways())


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), length=st.integers(1, 30))
def test_deltas_of_a_stream_join_to_its_text(new_runs, seed, length):
    instructions = Writer(random.Random(seed)).write(length)

    async def run() -> None:
        outcome = await new_runs().whole(*instructions)
        if outcome.failed():
            return
        for event in outcome.events:
            if isinstance(event, Synced):
                (sync,) = [i for i in instructions if i.op == event.op]
                assert (event.text or "").endswith(outcome.streamed(sync.stream))
                if sync.stream == 0:
                    assert event.text == outcome.streamed(0)

    asyncio.run(run())


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32), turns=st.integers(0, 60))
def test_cancelling_anywhere_leaks_nothing(new_runs, seed, turns):
    dice = random.Random(seed)
    instructions = Writer(dice).write(30)

    async def run() -> None:
        runs = new_runs()
        runs.executor.turns = lambda: dice.randint(0, 9)
        interpreter, events = runs.start()
        task = asyncio.create_task(interpreter.run())
        for piece in _pieces(instructions, dice):
            interpreter.feed(piece, False)
            await asyncio.sleep(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        interpreter.cancel()
        await asyncio.wait_for(task, 5)
        assert isinstance(events[-1], Done)
        assert events[-1].error is not None
        assert runs.executor.leaked == 0
        assert runs.executor.running == 0

    asyncio.run(run())
