from __future__ import annotations

import signal
import threading
import time

import pytest
import ramet as rt


@rt.function
def greet(s, name, greeting="Hello"):
    s += f"{greeting}, {name}" + rt.gen("end")
    return f"{greeting}/{name}"


def test_the_first_parameter_must_be_s():
    with pytest.raises(rt.ProgramError, match=r"'state'.*test_function\.py"):

        @rt.function
        def f(state):
            pass

    with pytest.raises(rt.ProgramError, match="takes none"):
        rt.function(lambda: None)


def test_only_plain_functions_are_programs():
    async def f(s):
        pass

    def g(s):
        yield

    with pytest.raises(rt.ProgramError, match="arun"):
        rt.function(f)
    with pytest.raises(rt.ProgramError, match="yield"):
        rt.function(g)


def test_arguments_are_python_s(scripted):
    backend = scripted({"end": lambda _: "!"})
    assert greet.run("Ann", backend=backend).text() == "Hello, Ann!"
    assert greet.run(name="Bob", greeting="Hi", backend=backend).text() == "Hi, Bob!"
    assert greet.run("Cid", "Ho", backend=backend).ret_value == "Ho/Cid"
    assert greet.__name__ == "greet"


@pytest.mark.parametrize(
    ("args", "kwargs", "named"),
    [
        ((), {}, "name"),
        (("a", "b", "c"), {}, "too many"),
        (("a",), {"colour": 1}, "colour"),
        (("a",), {"name": "b"}, "name"),
        (("a",), {"max_length": 3}, "max_length"),
    ],
)
def test_bad_arguments(scripted, args, kwargs, named):
    with pytest.raises(TypeError, match=named) as caught:
        greet.run(*args, backend=scripted(), **kwargs)
    assert isinstance(caught.value, rt.ProgramError)


def test_sampling_is_the_default_of_every_gen(scripted):
    backend = scripted({"a": "1", "b": "2"})

    @rt.function
    def f(s):
        s += rt.gen("a") + rt.gen("b", temperature=0.5, max_tokens=2)

    f.run(backend=backend, temperature=0, max_new_tokens=9, stop=["x"], seed=None)
    one, two = (call.sampling for call in backend.calls)
    assert (one.temperature, one.max_new_tokens, one.stop) == (0, 9, ("x",))
    assert (two.temperature, two.max_new_tokens, two.stop) == (0.5, 2, ("x",))


def test_defaults_leave_the_length_to_the_runtime(scripted):
    backend = scripted({"end": "!"})
    greet.run("x", backend=backend)
    assert backend.calls[0].sampling.max_new_tokens is None
    assert backend.calls[0].sampling.temperature == 1.0


def test_a_function_s_own_parameter_wins_over_sampling(scripted):
    backend = scripted({"a": "1"})

    @rt.function
    def f(s, seed):
        s += f"{seed}" + rt.gen("a")

    f.run(seed="pumpkin", backend=backend)
    assert backend.calls[0].prompt == "pumpkin"


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", -1), ("top_p", 2), ("max_new_tokens", "x"), ("n", 0)]
)
def test_bad_sampling_fails_at_the_call(scripted, name, value):
    with pytest.raises(ValueError, match=name):
        greet.run("x", backend=scripted(), **{name: value})


def test_bind_fixes_arguments(scripted):
    backend = scripted({"end": lambda _: "!"})
    polite = greet.bind(greeting="Good day")
    assert polite.run("Ann", backend=backend).text() == "Good day, Ann!"
    assert greet.bind(name="Z").run(backend=backend).text() == "Hello, Z!"
    assert greet.bind(name="Z").run("Yo", backend=backend).text() == "Yo, Z!"
    with pytest.raises(TypeError, match="colour"):
        greet.bind(colour="red")


def test_no_backend_says_what_to_do():
    rt.set_default_backend(None)
    with pytest.raises(rt.BackendError, match="set_default_backend"):
        greet.run("x")


def test_the_default_backend(scripted):
    backend = scripted({"end": lambda _: "!"})
    rt.set_default_backend(backend)
    try:
        assert greet.run("x")["end"] == "!"
        rt.flush_cache()
        assert rt.get_server_info()["model"] == "scripted"
    finally:
        rt.set_default_backend(None)


def test_a_program_inside_another_is_one_of_its_own(scripted):
    backend = scripted({"end": lambda prompt: str(len(prompt))})

    @rt.function
    def outer(s):
        s += "outer text"
        inner = greet("Ann")
        s += " " + inner["end"]

    state = outer.run(backend=backend)
    assert state.text() == "outer text 10"
    assert backend.calls[0].prompt == "Hello, Ann"


def test_a_program_called_with_a_state_goes_on_in_it(scripted):
    @rt.function
    def outer(s):
        s += "A: "
        greet(s, "Ann")
        return s["end"]

    state = outer.run(backend=scripted({"end": "!"}))
    assert state.text() == "A: Hello, Ann!"
    assert state.ret_value == "!"


def test_a_timeout_aborts(scripted):
    backend = scripted({"end": "!"}, delay=30)
    began = time.monotonic()
    with pytest.raises(rt.BackendError, match=r"0\.2 s"):
        greet.run("x", backend=backend, timeout=0.2)
    assert time.monotonic() - began < 3
    _until(lambda: backend.open_contexts == 0)


def test_a_timeout_reaches_readers_inside(scripted):
    @rt.function
    def f(s):
        s += rt.gen("a")
        s["a"]

    with pytest.raises(rt.BackendError, match=r"0\.2 s"):
        f.run(backend=scripted({"a": "1"}, delay=30), timeout=0.2)


def test_a_run_in_time_is_not_touched(scripted):
    state = greet.run("x", backend=scripted({"end": "!"}), timeout=5)
    time.sleep(0.05)
    assert state["end"] == "!"


def test_an_interrupt_aborts(scripted):
    backend = scripted({"end": "!"}, delay=30)
    main = threading.main_thread().ident
    timer = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        greet.run("x", backend=backend)
    assert time.monotonic() - began < 10
    _until(lambda: backend.open_contexts == 0)


def test_cancel_keeps_what_has_come(scripted):
    backend = scripted({"a": "1", "b": lambda _: time.sleep(1) or "2"})

    @rt.function
    def f(s):
        s += rt.gen("a") + rt.gen("b")

    state = f.run(backend=backend, stream=True)
    assert state["a"] == "1"
    state.cancel()
    assert state["a"] == "1"
    with pytest.raises(rt.AbortedError):
        state["b"]
    assert isinstance(state.error(), rt.AbortedError)
    _until(lambda: backend.open_contexts == 0)


def test_with_stream_errors_of_the_function_are_raised_at_readers(scripted):
    @rt.function
    def f(s):
        s += rt.gen("a")
        raise ZeroDivisionError("mine")

    for read in (
        lambda s: s["b"],
        lambda s: list(s.text_iter("b")),
        lambda s: s.ret_value,
        lambda s: list(s.events()),
    ):
        state = f.run(backend=scripted({"a": "1"}), stream=True)
        _until(lambda state=state: state._recording.closed)
        with pytest.raises(ZeroDivisionError, match="mine"):
            read(state)
        assert isinstance(state.error(), ZeroDivisionError)


def test_use_from_several_threads(scripted):
    """Branches may be grown by threads of the function's own."""
    backend = scripted({"x": lambda prompt: prompt[-1]})

    @rt.function
    def f(s):
        forks = s.fork(8)

        def grow(i):
            forks[i] += f"{i}" + rt.gen("x")

        threads = [threading.Thread(target=grow, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        forks.join()
        return s["x"]

    assert f.run(backend=backend).ret_value == [str(i) for i in range(8)]


def _until(check, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.005)
