"""Random programs with switches and loops: what runs lazily, a line at a time, and what is sent
whole ask for the same and end the same."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import random
import time
from typing import Any

import ramet as rt
from hypothesis import assume, given, settings
from hypothesis import strategies as st

NAMES = "xyz"
LISTS = "pq"
"""Names that only joins bind."""
WORDS = "abc"


class Writer:
    """Writes what a random program does, as nested lists. ``known``: names that are surely bound
    as one text on the branch that is written."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.size = 0

    def block(self, known: set[str], held: int, depth: int, role: bool) -> tuple[list[Any], int]:
        steps: list[Any] = []
        for _ in range(self.dice.randint(1, 5 if depth else 7)):
            moves = ["text", "text", "gen", "gen", "select", "bind", "hold", "use", "scope"]
            moves.append("gather")
            if depth < 3 and self.size < 60:
                moves += ["switch", "switch", "repeat", "repeat", "fork"]
            if not role:
                moves.append("role")
            held = self.step(self.dice.choice(moves), steps, known, held, depth, role)
        return steps, held

    def step(self, move: str, steps: list[Any], known: set[str], held: int, depth: int, role: bool):
        self.size += 1
        dice, name = self.dice, self.dice.choice(NAMES)
        some = dice.choice(sorted(known)) if known else None
        if move == "text":
            steps.append(("text", dice.choice(["a ", "bé", "\n"]), some))
        elif move in ("gen", "select"):
            steps.append((move, name))
            known.add(name)
        elif move == "bind":
            steps.append(("bind", name, some))
            known.add(name)
        elif move == "hold" and some:
            steps.append(("hold", some))
            held += 1
        elif move == "use" and held:
            steps.append(("use", dice.randrange(held)))
        elif move == "scope":
            inner, _ = self.block(known, held, 3, role)
            steps.append(("scope", name, inner))
            known.add(name)
        elif move == "gather":
            steps.append(("gather", dice.choice(LISTS), dice.randint(1, 3)))
        elif move == "role":
            inner, _ = self.block(known, held, max(depth, 2), True)
            steps.append(("role", dice.choice(["user", "assistant"]), inner))
        elif move == "fork":
            self.fork(steps, known, held, depth, role)
        elif move == "switch" and some:
            self.switch(steps, some, known, held, depth, role)
        elif move == "repeat":
            inside = set(known)
            body, _ = self.block(inside, held, depth + 1, role)
            until = dice.choice(sorted(inside)) if inside and dice.random() < 0.8 else None
            count = dice.choice([None, name])
            steps.append(("repeat", dice.randint(1, 4), until, dice.choice(WORDS), count, body))
            known |= inside | ({count} if count else set())
        return held

    def switch(
        self, steps: list[Any], on: str, known: set[str], held: int, depth: int, role: bool
    ) -> None:
        arms, ends = [], []
        for word in self.dice.sample(WORDS, self.dice.randint(1, 3)):
            inside = set(known)
            arms.append((word, self.block(inside, held, depth + 1, role)[0]))
            ends.append(inside)
        inside = set(known)
        default = None
        if self.dice.random() < 0.5:
            default = self.block(inside, held, depth + 1, role)[0]
        ends.append(inside)
        match = self.dice.choice(["strip", "exact", "contains"])
        steps.append(("switch", on, match, arms, default))
        known |= set.intersection(*ends)

    def fork(self, steps: list[Any], known: set[str], held: int, depth: int, role: bool) -> None:
        """Texts are joined, not names, so that no name is a list; one value may be taken on."""
        branches, taken = [], None
        for number in range(self.dice.randint(1, 3)):
            inside = set(known)
            branches.append(self.block(inside, held, depth + 1, role)[0])
            if inside and self.dice.random() < 0.5:
                taken = (self.dice.choice(NAMES), number, self.dice.choice(sorted(inside)))
        steps.append(("fork", branches, taken))
        if taken is not None:
            known.add(taken[0])


def act(s: Any, steps: list[Any], held: list[str]) -> None:
    """Do what was written, with a state that is lazy or traced."""
    for kind, *rest in steps:
        if kind == "text":
            s += rest[0] + (s[rest[1]] if rest[1] else "")
        elif kind == "gen":
            s += rt.gen(rest[0])
        elif kind == "select":
            s += rt.select(rest[0], list(WORDS))
        elif kind == "bind":
            s[rest[0]] = "b" if rest[1] is None else s[rest[1]] + "!"
        elif kind == "hold":
            held.append(s[rest[0]])
        elif kind == "use":
            s += held[rest[0]]
        elif kind == "scope":
            with s.var_scope(rest[0]):
                act(s, rest[1], list(held))
        elif kind == "gather":
            with s.fork(rest[1]) as forks:
                forks += [f"{number}:" + rt.gen(rest[0]) for number in range(rest[1])]
        elif kind == "role":
            with getattr(s, rest[0])():
                act(s, rest[1], list(held))
        elif kind == "fork":
            forks = s.fork(len(rest[0]))
            branches, taken = rest
            for branch, inner in zip(forks, branches, strict=True):
                act(branch, inner, list(held))
            if taken is not None:
                s[taken[0]] = forks[taken[1]][taken[2]]
            forks.join("concate_and_append")
        elif kind == "switch":
            on, match, arms, default = rest
            arms = {word: arm_of(inner, held) for word, inner in arms}
            other = None if default is None else arm_of(default, held)
            s.switch(s[on], arms, other, match=match)
        else:
            times, until, word, count, body = rest
            s.repeat(arm_of(body, held), times, until=until_of(until, word), count=count)


def until_of(name: str | None, word: str) -> Any:
    return None if name is None else lambda s: rt.matches(s[name], word)


def arm_of(steps: list[Any], held: list[str]) -> Any:
    return lambda s: act(s, steps, list(held))


def answer(prompt: str) -> str:
    """One of a few texts, by all that came before it."""
    number = hashlib.sha256(prompt.encode()).digest()[0]
    return ["a", " b", "c ", "ab", "b"][number % 5]


def pick(call: Any) -> Any:
    """What a script answers to a call."""
    text = answer(f"{call.name}/{call.prompt}")
    return text if call.kind == "gen" else WORDS.index(text.strip()[0])


def values(state: Any) -> dict[str, Any]:
    return {name: state.get(name) for name in NAMES + LISTS}


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**48))
def test_whole_or_line_by_line_it_is_the_same(seed):
    steps, _ = Writer(random.Random(seed)).block(set(), 0, 0, False)

    @rt.function
    def program(s):
        act(s, steps, [])

    answers = dict.fromkeys(NAMES + LISTS, pick)
    lazy_on, whole_on = (rt.testing.ScriptedBackend(answers) for _ in range(2))
    try:
        lazy = program.run(backend=lazy_on)
        lazy.sync()
    except rt.ProgramError as error:
        assume("exceeds" not in error.message)  # a value that doubles again and again
        raise
    compiled = program.compile()
    whole = compiled.run(backend=whole_on)
    assert whole.error() is None
    assert whole.text() == lazy.text()
    assert whole.messages() == lazy.messages()
    assert values(whole) == values(lazy)
    for name in NAMES + LISTS:
        assert whole.history(name) == lazy.history(name)

    def asked(backend: Any) -> list[Any]:
        return sorted((c.kind, c.name, c.prompt, c.choices) for c in backend.calls)

    assert asked(whole_on) == asked(lazy_on)
    assert whole_on.open_contexts == lazy_on.open_contexts == 0
    assert str(compiled).count("\n") >= len(compiled.program.instructions)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**48), events=st.integers(0, 40))
def test_given_up_anywhere_nothing_is_held(seed, events):
    steps, _ = Writer(random.Random(seed)).block(set(), 0, 0, False)

    @rt.function
    def program(s):
        act(s, steps, [])

    backend = rt.testing.ScriptedBackend(dict.fromkeys(NAMES + LISTS, pick))
    state = program.compile().run(backend=backend, stream=True)
    with contextlib.suppress(rt.ProgramError):
        for _ in itertools.islice(state.events(), events):
            pass
    state.cancel()
    deadline = time.monotonic() + 10
    while backend.open_contexts:
        assert time.monotonic() < deadline
        time.sleep(0.001)
