from __future__ import annotations

import asyncio
import threading
import time

import pytest
import ramet as rt
from ramet.batch import threads_for


@rt.function
def echo(s, word, mark="."):
    s += word + rt.gen("x") + mark


def _answer(prompt: str) -> str:
    time.sleep(0.05 if prompt.endswith("0") else 0.0)
    return prompt.upper()


def test_the_order_is_kept(scripted):
    items = [{"word": f"w{i}"} for i in range(40)]
    states = echo.run_batch(items, backend=scripted({"x": _answer}))
    assert [state["x"] for state in states] == [f"W{i}" for i in range(40)]


def test_tuples_and_lists_are_arguments_in_order(scripted):
    states = echo.run_batch([("a",), ["b", "!"]], backend=scripted({"x": lambda p: p.upper()}))
    assert [state.text() for state in states] == ["aA.", "bB!"]
    bound = echo.bind(word="w").run_batch([("?",)], backend=scripted({"x": "X"}))
    assert bound[0].text() == "wX?"


def test_an_empty_batch(scripted):
    assert echo.run_batch([], backend=scripted()) == []
    assert list(echo.run_batch([], backend=scripted(), generator_style=True)) == []


@pytest.mark.parametrize(
    ("item", "named"),
    [({}, "word"), ({"word": "a", "colour": 1}, "colour"), ((), "word"), (("a", "b", "c"), "many")],
)
def test_a_mismatch_names_the_item_and_the_argument(scripted, item, named):
    backend = scripted({"x": "1"})
    with pytest.raises(TypeError, match=f"item 1 of the batch: .*mismatch.*{named}"):
        echo.run_batch([{"word": "fine"}, item], backend=backend)
    assert backend.calls == [], "nothing runs when an item cannot"
    with pytest.raises(TypeError, match="a dict or a tuple"):
        echo.run_batch(["word"], backend=backend)
    with pytest.raises(TypeError, match="unexpected keyword argument 'tempo'"):
        echo.run_batch([("a",)], backend=backend, tempo=1)
    with pytest.raises(ValueError, match="num_threads"):
        echo.run_batch([("a",)], backend=backend, num_threads=0)


def test_generator_style_yields_in_order_as_they_are_ready(scripted):
    release = threading.Event()

    def answer(prompt: str) -> str:
        if prompt == "w2":
            assert release.wait(10)
        return "ok"

    states = echo.run_batch(
        [(f"w{i}",) for i in range(4)], backend=scripted({"x": answer}), generator_style=True
    )
    assert next(states).text() == "w0ok."
    assert next(states).text() == "w1ok."
    release.set()
    assert [state.text() for state in states] == ["w2ok.", "w3ok."]


def test_a_progress_bar_does_not_change_the_result(scripted, capsys):
    states = echo.run_batch(
        [(f"{i}",) for i in range(5)], backend=scripted({"x": lambda p: p}), progress_bar=True
    )
    assert [state["x"] for state in states] == list("01234")
    assert "5/5" in capsys.readouterr().out


def test_an_error_of_the_runtime_costs_only_its_item(scripted):
    def answer(prompt: str):
        return rt.ContextLengthError("too long") if prompt == "w1" else "ok"

    @rt.function
    def f(s, word):
        s += word + rt.gen("x")
        return s["x"]

    states = f.run_batch([(f"w{i}",) for i in range(3)], backend=scripted({"x": answer}))
    assert [states[0]["x"], states[2]["x"]] == ["ok", "ok"]
    with pytest.raises(rt.ContextLengthError):
        states[1]["x"]
    assert isinstance(states[1].error(), rt.ContextLengthError)


def test_an_error_of_the_function_is_raised_and_the_rest_aborted(scripted):
    @rt.function
    def f(s, word):
        if word == "w1":
            raise ZeroDivisionError(word)
        s += word + rt.gen("x")

    backend = scripted({"x": "ok"}, delay=20)
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="w1"):
        f.run_batch([("w1",), ("w2",), ("w3",)], backend=backend)
    assert time.monotonic() - began < 10
    _until(lambda: backend.open_contexts == 0)


@pytest.mark.parametrize("generator", [False, True])
def test_an_error_of_the_function_says_of_which_item(scripted, generator):
    @rt.function
    def f(s, word, text=""):
        if word == "w1":
            raise RuntimeError("broke")
        s += word + text

    items = [{"word": f"w{i}", "text": "long " * 1000} for i in range(3)]
    with pytest.raises(RuntimeError, match="broke") as caught:
        list(f.run_batch(items, backend=scripted(), generator_style=generator))
    assert str(caught.value) == "broke"
    (note,) = caught.value.__notes__
    assert note.startswith("item 1 of the batch, arguments {'text': 'long long")
    assert note.endswith("'word': 'w1'}")
    assert len(note) < 200, "the arguments are shortened"
    with pytest.raises(RuntimeError) as caught:
        asyncio.run(f.arun_batch(items, backend=scripted()))
    assert caught.value.__notes__ == [note]


def test_num_threads_bounds_what_runs_at_a_time(scripted):
    running, most, lock = 0, 0, threading.Lock()

    def answer(_: str) -> str:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1
        return "x"

    items = [(f"{i}",) for i in range(9)]
    echo.run_batch(items, backend=scripted({"x": answer}), num_threads=3)
    assert most <= 3


def test_auto_is_many_but_no_more_than_the_batch():
    assert threads_for(5, "auto") == 5
    assert threads_for(100_000, "auto") >= 96
    assert threads_for(100, 8) == 8


def test_sampling_and_timeout_are_for_each(scripted):
    backend = scripted({"x": lambda _: "1"})
    echo.run_batch([("a",), ("b",)], backend=backend, temperature=0.25, timeout=5)
    assert [call.sampling.temperature for call in backend.calls] == [0.25, 0.25]


def test_compiled_batches_register_once(spy):
    backend = spy({"x": lambda prompt: prompt})
    compiled = echo.compile()
    states = compiled.run_batch([{"word": f"w{i}"} for i in range(20)], backend=backend)
    assert [state.text() for state in states] == [f"w{i}w{i}." for i in range(20)]
    assert all(program is compiled.program for program in backend.registered)
    assert all(opening.registered is compiled.program for opening in backend.openings)
    with pytest.raises(ValueError, match=r"item 0.*'word'"):
        compiled.run_batch([{}], backend=backend)


def test_a_batch_traces_its_function_once(scripted):
    traced = []

    @rt.function(compile=True)
    def slow(s, word):
        traced.append(threading.get_ident())
        time.sleep(0.02)  # long enough for every thread of the batch to come by
        s += f"<{word}>" + rt.gen("x")

    states = slow.run_batch([(f"w{i}",) for i in range(8)], backend=scripted({"x": "1"}))
    assert [state.text() for state in states] == [f"<w{i}>1" for i in range(8)]
    assert len(traced) == 1


async def test_an_async_batch(scripted):
    backend = scripted({"x": lambda p: p.upper()})
    states = await echo.arun_batch([(f"w{i}",) for i in range(10)], backend=backend)
    assert [state["x"] for state in states] == [f"W{i}" for i in range(10)]


async def test_a_cancelled_batch_aborts(scripted):
    backend = scripted({"x": "1"}, delay=30)
    task = asyncio.create_task(echo.arun_batch([("a",), ("b",)], backend=backend))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    _until(lambda: backend.open_contexts == 0)


def _until(check, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_more_programs_run_than_there_are_threads(scripted):
    """A program whose function has returned holds no thread."""
    backend = scripted({"x": "1"}, delay=0.3)
    began = time.monotonic()
    states = echo.run_batch([(f"{i}",) for i in range(600)], backend=backend)
    assert len(states) == 600
    assert time.monotonic() - began < 2.5


def test_misuse_in_a_function_is_raised(scripted):
    @rt.function
    def f(s, word):
        s += None if word == "w1" else word

    with pytest.raises(ValueError, match="None"):
        f.run_batch([("w0",), ("w1",)], backend=scripted())


def test_a_timeout_costs_only_its_item(scripted):
    def answer(prompt: str) -> str:
        time.sleep(1.5 if prompt == "w1" else 0)
        return "ok"

    states = echo.run_batch(
        [(f"w{i}",) for i in range(3)], backend=scripted({"x": answer}), timeout=0.8
    )
    assert states[0]["x"] == states[2]["x"] == "ok"
    with pytest.raises(rt.BackendError, match=r"0\.8 s"):
        states[1]["x"]
