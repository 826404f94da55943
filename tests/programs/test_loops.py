"""Agents and searches as one program: the same tokens as when Python leads them."""

from __future__ import annotations

from typing import Any

import pytest
import ramet as rt

TRACED = {"return_logprob": True, "logprob_start_len": 0, "temperature": 0.0}
SHOTS = """\
Question: How many people live in Paris?
Thought: I need to look up the population of Paris.
Act: lookup Paris
Seen: 2100000
Thought: I know the answer now.
Act: finish 2100000

"""


@rt.function
def react(s: Any, question: str) -> None:
    s += SHOTS + "Question: " + question + "\n"

    def look(s: Any) -> None:
        s += rt.gen("city", max_tokens=6, stop="\n") + "\nSeen: "
        s.switch(s["city"], {"Rome": "2800000", "Berlin": "3700000"}, "nothing")
        s += "\n"

    def turn(s: Any) -> None:
        s += "Thought:" + rt.gen("thought", max_tokens=16, stop="\n") + "\n"
        s += "Act:" + rt.select("act", [" lookup", " finish"])
        s.switch(s["act"], {"lookup": look}, rt.gen("answer", max_tokens=6, stop="\n"))

    s.repeat(turn, 4, until=lambda s: rt.matches(s["act"], "finish"), count="turns")
    s += "\nTurns: " + s["turns"] + rt.gen("end", max_tokens=4)


@rt.function
def search(s: Any, start: str) -> None:
    """A beam of one: three ways a turn, one is chosen and followed."""
    s += "A story in short sentences. " + start

    def turn(s: Any) -> None:
        forks = s.fork(3)
        for fork, word in zip(forks, (" Then", " But", " So"), strict=True):
            fork += word + rt.gen("way", max_tokens=8, stop=".") + "."
        for number, fork in enumerate(forks):
            s[f"way {number}"] = fork["way"]
        judge = s.fork(1)
        judge[0] += "\nBest way to go on: " + rt.select("pick", ["Then", "But", "So"])
        s["pick"] = judge[0]["pick"]
        forks.join()
        judge.join()
        s.switch(
            s["pick"],
            {
                "Then": " Then" + s["way 0"] + ".",
                "But": " But" + s["way 1"] + ".",
                "So": " So" + s["way 2"] + ".",
            },
        )

    s.repeat(turn, 3, until=lambda s: rt.matches(s["way 0"], "end", match="contains"))
    s += " The end:" + rt.gen("end", max_tokens=6)


def traced(state: Any, name: str) -> Any:
    meta = state.get_meta_info(name)
    if "choices" in meta:
        return [[token for _, token, _ in row] for row in meta["input_token_logprobs"]]
    return [
        [token for _, token, _ in meta[key]]
        for key in ("input_token_logprobs", "output_token_logprobs")
    ]


@pytest.mark.parametrize(
    ("program", "argument", "names"),
    [
        (react, "How many people live in Rome?", ("thought", "act", "end")),
        (search, "Once there was a fox.", ("end",)),
    ],
    ids=["react", "search"],
)
def test_the_same_tokens(cold: Any, program: Any, argument: str, names: tuple[str, ...]) -> None:
    lazy = program.run(argument, backend=cold, **TRACED)
    text = lazy.text()
    want = {name: traced(lazy, name) for name in names}
    compiled = program.compile()
    for warm in (False, True):
        if not warm:
            cold.flush_cache()
        whole = compiled.run(argument, backend=cold, **TRACED)
        assert whole.error() is None
        assert whole.text() == text
        assert {name: traced(whole, name) for name in names} == want
        for name in ("thought", "act", "answer", "turns", "pick", "way", "city"):
            assert whole.history(name) == lazy.history(name)
            assert (name in whole) == (name in lazy)
    streamed = compiled.run(argument, backend=cold, stream=True, **TRACED)
    assert "".join(streamed.text_iter()) == text


def test_a_batch_of_agents_is_sent_once(runtime: Any) -> None:
    cities = ["Rome", "Berlin", "Oslo"]
    arguments = [{"question": f"How many people live in {city}?"} for city in cities]
    whole: Any = react.compile().run_batch(arguments, backend=runtime, temperature=0)
    lazy: Any = react.run_batch(arguments, backend=runtime, temperature=0)
    assert [state.text() for state in whole] == [state.text() for state in lazy]
    assert len({state.text() for state in whole}) == 3


def test_a_loop_that_is_cancelled_leaves_nothing(runtime: Any, settled: Any) -> None:
    @rt.function
    def endless(s: Any) -> None:
        s += "Count: 1,"
        s.repeat(rt.gen("x", max_tokens=8, ignore_eos=True) + ",", 10_000)

    state = endless.compile().run(backend=runtime, stream=True)
    next(iter(state.events()))
    state.cancel()
    settled(runtime)
    with pytest.raises(rt.AbortedError):
        state.text()
    with pytest.raises(rt.BackendError, match="did not finish"):
        endless.compile().run(backend=runtime, timeout=0.5)
    settled(runtime)
