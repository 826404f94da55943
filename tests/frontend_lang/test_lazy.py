from __future__ import annotations

import threading
import time

import pytest
import ramet as rt
from ramet import run as run_module


@pytest.fixture
def never_early(monkeypatch):
    """Without the flush of the IO thread, so that messages are counted exactly."""
    monkeypatch.setattr(run_module, "FLUSH_SECONDS", 3600.0)


def test_a_program_without_questions_is_one_message(spy, never_early):
    backend = spy({"a": lambda _: "1", "b": "2"})

    @rt.function
    def f(s):
        s += rt.user("q")
        forks = s.fork(3)
        for branch in forks:
            branch += rt.assistant(rt.gen("a"))
        forks.join()
        s += rt.assistant(rt.gen("b"))

    state = f.run(backend=backend)
    assert state["a"] == ["1", "1", "1"]
    assert len(backend.sent) == 1
    assert backend.sent[0][1] is True
    ops = [i.op for i in backend.sent[0][0]]
    assert ops == sorted(ops), "instructions travel in program order"
    assert len(set(ops)) == len(ops)


def test_questions_cut_the_program(spy, never_early):
    backend = spy({"a": "1", "b": "2"})

    @rt.function
    def f(s):
        s += "x" + rt.gen("a")
        s += "then"
        assert s["a"] == "1"
        s += rt.gen("b")

    f.run(backend=backend)
    assert backend.messages == [["Text", "Gen", "Text"], ["Gen", "Sync"]]
    assert [closed for _, closed in backend.sent] == [False, True]


def test_join_alone_never_flushes(spy, never_early):
    backend = spy({"a": lambda _: "1"})

    @rt.function
    def f(s):
        forks = s.fork(2)
        forks += rt.gen("a")
        forks.join()
        assert backend.sent == []
        s["a"]
        assert len(backend.sent) == 1

    f.run(backend=backend)


@pytest.mark.parametrize(
    "ask",
    [
        lambda s: s["a"],
        lambda s: s.text(),
        lambda s: s.messages(),
        lambda s: s.sync(),
        lambda s: s.error(),
        lambda s: s.get_meta_info("a"),
        lambda s: "a" in s,
        lambda s: list(s.text_iter()),
        lambda s: list(s.text_iter("a")),
    ],
)
def test_every_question_flushes(spy, never_early, ask):
    backend = spy({"a": "1"})

    @rt.function
    def f(s):
        s += rt.user("q") + rt.assistant(rt.gen("a"))
        assert backend.sent == []
        ask(s)
        assert len(backend.sent) == 1

    f.run(backend=backend, timeout=10)


def test_known_values_need_no_message(spy, never_early):
    backend = spy()

    @rt.function
    def f(s):
        s["x"] = 3
        s += "text"
        assert s["x"] == 3
        assert "x" in s
        assert backend.sent == []

    f.run(backend=backend)


def test_side_effects_happen_once(scripted):
    calls = []

    @rt.function
    def f(s):
        calls.append("start")
        s += rt.gen("a")
        calls.append(s["a"])
        s += rt.gen("b")

    f.run(backend=scripted({"a": "1", "b": "2"}))
    assert calls == ["start", "1"]


def test_generation_overlaps_with_what_python_does(scripted):
    started = threading.Event()

    def answer(prompt: str) -> str:
        started.set()
        return "1"

    @rt.function
    def f(s):
        s += "q" + rt.gen("a")
        assert started.wait(5), "the generation begins while the function goes on"
        return s["a"]

    assert f.run(backend=scripted({"a": answer})).ret_value == "1"


def test_overlap_saves_time(scripted):
    @rt.function
    def f(s):
        s += rt.gen("a")
        time.sleep(0.3)
        return s["a"]

    began = time.monotonic()
    f.run(backend=scripted({"a": "1"}, delay=0.3))
    assert time.monotonic() - began < 0.55


def test_what_came_quickly_after_travels_along(spy):
    backend = spy({"a": lambda _: "1"})

    @rt.function
    def f(s):
        forks = s.fork(4)
        forks += rt.gen("a")
        time.sleep(0.05)
        s += "late"

    f.run(backend=backend)
    assert backend.messages[0][0] == "Fork"
    assert backend.messages[0].count("Gen") == 4


def test_an_exception_drops_what_is_unsent(spy, never_early):
    backend = spy({"a": "1"})

    @rt.function
    def f(s):
        s += rt.gen("a")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        f.run(backend=backend)
    assert backend.sent == []
    assert backend.cancels == 0
    assert backend.inner.calls == []


def test_an_exception_aborts_what_was_sent(spy):
    backend = spy({"a": "1", "b": "2"}, delay=30)

    @rt.function
    def f(s):
        s += rt.gen("a")
        time.sleep(0.05)
        s += rt.gen("b")
        raise ZeroDivisionError

    began = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        f.run(backend=backend)
    assert time.monotonic() - began < 5
    assert backend.cancels == 1
    _until(lambda: backend.inner.open_contexts == 0)
    assert [call.name for call in backend.inner.calls] == ["a"]


def test_nonsense_from_the_language_is_an_error(scripted):
    """The interpreter refuses a program: every reader says why."""
    from ramet.runtime.program.instructions import Fork

    @rt.function
    def f(s):
        s._recording.emit(Fork(op=10_000, stream=77, children=(78,)))
        s += rt.gen("a")
        return s["a"]

    with pytest.raises(rt.ProgramError, match="77"):
        f.run(backend=scripted({"a": "1"}))


def _until(check, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.005)
