"""Lazy and compiled runs of a program give the same tokens; Python runs once, and meanwhile."""

from __future__ import annotations

import time
from typing import Any

import pytest
import ramet as rt

TRACED = {"return_logprob": True, "logprob_start_len": 0, "temperature": 0.0}


@rt.function
def tips(s: Any, topic: str) -> None:
    s += rt.system("You are terse.")
    s += rt.user(f"Give two tips about {topic}.")
    branches = s.fork(2)
    for i, b in enumerate(branches):
        b += rt.assistant(f"Tip {i + 1}: " + rt.gen("tip", max_tokens=12, stop="\n"))
    s += rt.assistant(
        "1. " + branches[0]["tip"] + "\n2. " + branches[1]["tip"] + "\nBest: "
        + rt.select("best", ["1", "2"]) + rt.gen("why", max_tokens=6)
    )  # fmt: skip


@rt.function
def nested(s: Any, topic: str) -> None:
    s += f"About {topic}: "
    outer = s.fork(2)
    for i, branch in enumerate(outer):
        branch += f"part {i} "
        branch += rt.gen("head", max_tokens=5)
        inner = branch.fork(2)
        for j, leaf in enumerate(inner):
            leaf += f" {i}.{j}:"
            leaf += rt.gen("leaf", max_tokens=4)
        inner.join("concate_and_append")
        branch += rt.gen("tail", max_tokens=3)
    outer.join("concate_and_append")
    s += rt.gen("end", max_tokens=5)


@rt.function
def pieces(s: Any, topic: str) -> None:
    """Text in many small pieces, cut where tokens are not, and stops inside of tokens."""
    for letter in "Once upon a time, ":
        s += letter
    s += topic + " w"
    s += "as "
    s += rt.gen("first", max_tokens=16, stop=["e", "."])
    s += "e"
    s += "nd of "
    with s.var_scope("scope"):
        s += "the" + rt.gen("second", max_tokens=6) + "!"
    other = s.copy()
    other += " Other: " + rt.gen("third", max_tokens=5)
    s["remark"] = "and"
    s += " so "
    s += s["remark"]
    s += other["third"]
    s += rt.gen("fourth", max_tokens=4)


@rt.function
def chat(s: Any, topic: str) -> None:
    with s.user():
        s += "Tell me about "
        s += topic
    with s.assistant():
        s += rt.gen("first", max_tokens=10)
    s += rt.user("More, please.")
    s += rt.assistant_begin()
    s += rt.gen("second", max_tokens=10)
    s += rt.assistant_end()


PROGRAMS = {
    tips: ("best", "why"),
    nested: ("end",),
    pieces: ("first", "second", "fourth"),
    chat: ("first", "second"),
}


def ids(entries: list[Any]) -> list[int]:
    return [token for _, token, _ in entries]


def tokens(state: Any, names: tuple[str, ...]) -> list[Any]:
    """Prompt and output ids of each generation, as far as there are any."""
    found: list[Any] = []
    for name in names:
        meta = state.get_meta_info(name)
        if "choices" in meta:
            found.append([ids(entries) for entries in meta["input_token_logprobs"]])
        else:
            found.append((ids(meta["input_token_logprobs"]), ids(meta["output_token_logprobs"])))
    return found


@pytest.mark.parametrize("program", list(PROGRAMS), ids=lambda program: program.name)
def test_the_same_tokens(cold: Any, program: Any) -> None:
    names = PROGRAMS[program]
    topic = "sleep"
    lazy = program.run(topic, backend=cold, **TRACED)
    compiled = program.compile().run(topic, backend=cold, **TRACED)
    streamed = program.run(topic, backend=cold, stream=True, **TRACED)
    fixed = program.compile(topic=topic).run(backend=cold, **TRACED)
    want = tokens(lazy, names)
    assert all(want)
    for other in (compiled, streamed, fixed):
        assert tokens(other, names) == want
        assert other.text() == lazy.text()
        assert other.messages() == lazy.messages()
        assert other.error() is None


def test_reading_on_the_way_changes_no_token(cold: Any) -> None:
    """A read flushes what is unsent; flushes never cut text."""

    @rt.function
    def read(s: Any, eager: bool) -> None:
        for word in ("The cap", "ital of Fra", "nce", " is"):
            s += word
            if eager:
                s.sync()
        s += rt.gen("a", max_tokens=6)
        if eager:
            _ = s["a"]
        s += " fi"
        if eager:
            s.text()
        s += "nal"
        s += rt.gen("b", max_tokens=4)

    eager = read.run(True, backend=cold, **TRACED)
    whole = read.run(False, backend=cold, **TRACED)
    assert tokens(eager, ("a", "b")) == tokens(whole, ("a", "b"))
    prompt = ids(eager.get_meta_info("a")["input_token_logprobs"])
    assert prompt == cold.tokenizer.encode("The capital of France is")


def test_a_batch_of_a_compiled_program(runtime: Any) -> None:
    topics = ["sleep", "food", "rain", "work"]
    arguments = [{"topic": topic} for topic in topics]
    lazy: Any = tips.run_batch(arguments, backend=runtime, **TRACED)
    compiled: Any = tips.compile().run_batch(arguments, backend=runtime, **TRACED)
    for one, other in zip(lazy, compiled, strict=True):
        assert tokens(one, PROGRAMS[tips]) == tokens(other, PROGRAMS[tips])
        assert one.text() == other.text()
    assert len({state.text() for state in lazy}) == len(topics)


@pytest.mark.parametrize("stream", [False, True])
def test_side_effects_happen_once(runtime: Any, stream: bool) -> None:
    calls: list[str] = []

    @rt.function
    def effects(s: Any, word: str) -> str:
        calls.append("begin")
        s += f"The {word} is"
        s += rt.gen("x", max_tokens=3)
        calls.append(s["x"])
        for fork in s.fork(2):
            fork += " and"
            fork += rt.gen("y", max_tokens=2)
            calls.append(fork["y"])
        calls.append("end")
        return s["x"].upper()

    state = effects.run("sky", backend=runtime, stream=stream, temperature=0.0)
    assert state.ret_value == state["x"].upper()
    assert len(calls) == 5
    assert calls[0] == "begin"
    assert calls[-1] == "end"
    assert calls[1] == state["x"]
    calls.clear()
    effects.run_batch([{"word": w} for w in ("sea", "sun", "moon")], backend=runtime)
    assert len(calls) == 15


def test_data_dependent_control_flow(runtime: Any) -> None:
    @rt.function
    def loop(s: Any) -> None:
        s += "Numbers: 1"
        rounds = 0
        while len(s.text()) < 40 and rounds < 20:
            s += "," + rt.gen("n", max_tokens=3)
            if not s["n"].strip():
                s += "?"
            rounds += 1
        s["rounds"] = rounds

    state = loop.run(backend=runtime, temperature=0.0)
    assert 1 < state["rounds"] < 20
    assert len(state.text()) >= 40


def test_a_generation_runs_while_python_works(runtime: Any) -> None:
    """`s += gen(); slow(); s["x"]`: the generation is finished before anybody asks for it."""

    @rt.function
    def overlaps(s: Any) -> bool:
        before = runtime.server_info()["finished"]
        s += "The capital of France is"
        s += rt.gen("x", max_tokens=5)
        deadline = time.monotonic() + 30
        while runtime.server_info()["finished"] == before:  # slow(), which reads nothing
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        began = time.monotonic()
        value = s["x"]
        return bool(value) and time.monotonic() - began < 1.0

    assert overlaps.run(backend=runtime, temperature=0.0).ret_value


def test_branches_of_a_fork_run_together(runtime: Any) -> None:
    """All of them are under way before the first is read."""

    @rt.function
    def together(s: Any) -> int:
        before = runtime.server_info()["finished"]
        branches = s.fork(6)
        for i, branch in enumerate(branches):
            branch += f"{i} times two is"
            branch += rt.gen("x", max_tokens=60, ignore_eos=True)
        deadline = time.monotonic() + 30
        most = 0
        while time.monotonic() < deadline and most < 6:
            info = runtime.server_info()
            most = max(most, info["requests"]["running"])
            if info["finished"] > before:
                break
        return most

    assert together.run(backend=runtime, temperature=0.0).ret_value == 6


def test_a_program_calls_another(runtime: Any) -> None:
    @rt.function
    def inner(s: Any, word: str) -> None:
        s += f"The opposite of {word} is"
        s += rt.gen("x", max_tokens=3)

    @rt.function
    def outer(s: Any) -> None:
        first = inner(word="hot")
        s += "Opposites: " + first["x"]
        s += rt.gen("y", max_tokens=3)

    lazy = outer.run(backend=runtime, **TRACED)
    compiled = outer.compile().run(backend=runtime, **TRACED)
    assert tokens(lazy, ("y",)) == tokens(compiled, ("y",))


def test_a_compiled_program_needs_no_value(runtime: Any) -> None:
    @rt.function
    def needs(s: Any) -> None:
        s += "A" + rt.gen("x", max_tokens=2)
        if s["x"] == "b":
            s += "c"

    with pytest.raises(rt.ProgramError, match=r"test_lazy_and_compiled\.py"):
        needs.compile()
    needs.run(backend=runtime)
