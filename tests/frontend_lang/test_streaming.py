from __future__ import annotations

import threading

import pytest
import ramet as rt
from hypothesis import given, settings
from hypothesis import strategies as st


@rt.function
def chat(s, word):
    s += rt.user("q " + word)
    forks = s.fork(2)
    for branch in forks:
        branch += rt.assistant("I " + rt.gen("x"))
    s += rt.assistant(rt.gen("y") + rt.select("z", ["no", "yes"]) + rt.gen("n", n=2))
    forks.join()
    return forks


ANSWERS = {
    "x": lambda _: "one two three",
    "y": "four five",
    "z": "yes",
    "n": ["six seven", "other"],
}


def test_pieces_join_to_the_whole_text(scripted):
    state = chat.run("w", backend=scripted(ANSWERS), stream=True)
    pieces = list(state.text_iter())
    assert len(pieces) > 6
    assert "".join(pieces) == state.text()
    assert list(state.text_iter()) == pieces, "it can be read again"


def test_pieces_of_a_variable(scripted):
    state = chat.run("w", backend=scripted(ANSWERS), stream=True)
    assert list(state.text_iter("y")) == ["four", " five"]
    assert "".join(state.text_iter("z")) == "yes"
    assert list(state.text_iter("n")) == ["six", " seven"], "the sample that the text goes on with"
    assert list(state.text_iter("n")) == [e.delta for e in state.events() if e.variable == "n"]
    with pytest.raises(KeyError, match="'none'"):
        list(state.text_iter("none"))


def test_a_branch_s_pieces_begin_with_what_it_was_forked_from(scripted):
    state = chat.run("w", backend=scripted(ANSWERS), stream=True)
    for branch in state.ret_value:
        assert "".join(branch.text_iter()) == branch.text()
        assert branch.text().startswith("<user>q w</user>\n<assistant>I ")
        assert list(branch.text_iter("x")) == ["one", " two", " three"]


def test_without_stream_there_is_one_piece(scripted):
    state = chat.run("w", backend=scripted(ANSWERS))
    assert list(state.text_iter()) == [state.text()]
    assert list(state.text_iter("y")) == ["four five"]
    assert list(state.text_iter("n")) == ["six seven"]
    assert list(state.text_iter("x")) == ["one two three" * 2], "gathered"


def test_pieces_come_while_the_function_runs(scripted):
    release = threading.Event()

    @rt.function
    def f(s):
        s += "a" + rt.gen("x")
        assert release.wait(10)
        s += "b"

    state = f.run(backend=scripted({"x": "1"}), stream=True)
    pieces = state.text_iter()
    assert [next(pieces), next(pieces)] == ["a", "1"]
    release.set()
    assert list(pieces) == ["b"]


def test_readers_outside_wait_for_the_function(scripted):
    release = threading.Event()

    @rt.function
    def f(s):
        assert release.wait(10)
        s += "a" + rt.gen("x")
        return "back"

    state = f.run(backend=scripted({"x": "1"}), stream=True)
    threading.Timer(0.1, release.set).start()
    assert "x" in state
    assert state["x"] == "1"
    assert state.text() == "a1"
    assert state.ret_value == "back"
    assert "nothing" not in state


def test_events_show_all_branches(scripted):
    state = chat.run("w", backend=scripted(ANSWERS), stream=True)
    seen: dict[tuple, str] = {}
    for path, variable, delta in state.events():
        seen[path, variable] = seen.get((path, variable), "") + delta
    assert seen[(0,), "x"] == seen[(1,), "x"] == "one two three"
    assert seen[(), "y"] == "four five"
    assert seen[(), "z"] == "yes"


def test_an_error_ends_the_pieces(scripted):
    @rt.function
    def f(s):
        s += "a" + rt.gen("x") + rt.gen("y")

    state = f.run(backend=scripted({"x": "1", "y": rt.BackendError("engine is gone")}), stream=True)
    pieces = state.text_iter()
    assert [next(pieces), next(pieces)] == ["a", "1"]
    with pytest.raises(rt.BackendError, match="engine is gone"):
        next(pieces)
    with pytest.raises(rt.BackendError, match="engine is gone"):
        list(state.events())
    assert list(state.text_iter("x")) == ["1"]


program = st.lists(
    st.one_of(
        st.text(max_size=5).map(lambda text: ("text", text)),
        st.sampled_from(["g", "s", "fork", "user"]).map(lambda kind: (kind, "")),
    ),
    max_size=8,
)


@settings(max_examples=40, deadline=None)
@given(program, st.booleans())
def test_any_program_s_pieces_join_to_its_text(steps, compiled):
    @rt.function
    def f(s):
        for kind, text in steps:
            if kind == "text":
                s += text
            elif kind == "g":
                s += rt.gen("g")
            elif kind == "s":
                s += rt.select("s", ["a b", "b"])
            elif kind == "user":
                s += rt.user("hi " + rt.gen("u"))
            else:
                forks = s.fork(2)
                forks += "<" + rt.gen("f") + ">"
                forks.join("concate_and_append")

    answers = {"g": lambda _: "1 2", "s": lambda _: 0, "u": lambda _: "x y z", "f": lambda _: "k"}
    backend = rt.testing.ScriptedBackend(answers)
    run = f.compile().run if compiled else f.run
    whole = run(backend=backend).text()
    state = run(backend=backend, stream=True)
    assert "".join(state.text_iter()) == whole == state.text()
    root = "".join(event.delta for event in state.events() if event.path == ())
    assert root == whole


def test_a_timeout_ends_the_pieces(scripted):
    state = chat.run("w", backend=scripted({"x": lambda _: "1", "y": "2"}, delay=30), stream=True,
                     timeout=0.3)  # fmt: skip
    with pytest.raises(rt.BackendError, match=r"0\.3 s"):
        list(state.text_iter())
    with pytest.raises(rt.BackendError, match=r"0\.3 s"):
        state["y"]


async def test_sglang_s_names_of_the_arguments(scripted):
    state = chat.run("w", backend=scripted(ANSWERS), stream=True)
    assert "".join(state.text_iter(var_name="y")) == "four five"
    assert "".join([p async for p in state.text_async_iter(var_name="y")]) == "four five"
