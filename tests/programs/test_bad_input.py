"""Bad input gets an error that names what was wrong, and the runtime goes on as if nothing was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ramet as rt

ONE = {"temperature": 0.0, "max_new_tokens": 1}


def still_works(runtime: Any) -> None:
    reply = runtime.generate("The capital of France is", sampling_params=ONE)
    assert reply["text"] == " Paris"


@pytest.fixture
def runtime(runtime: Any) -> Any:
    """After each test it must still answer."""
    yield runtime
    still_works(runtime)


def test_prompt_beyond_the_context(runtime: Any) -> None:
    for ids in (list(range(8192)), list(range(8193)), [5] * 30000):
        with pytest.raises(rt.ContextLengthError, match="8192") as caught:
            runtime.generate(input_ids=ids, sampling_params=ONE)
        assert str(len(ids)) in str(caught.value)
    with pytest.raises(rt.ContextLengthError, match="8192"):
        runtime.generate("word " * 9000, sampling_params=ONE)


def test_prompt_beyond_the_context_in_a_stream_and_in_a_batch(runtime: Any) -> None:
    with pytest.raises(rt.ContextLengthError):
        list(runtime.generate(input_ids=[5] * 9000, sampling_params=ONE, stream=True))
    with pytest.raises(rt.ContextLengthError):
        runtime.generate(input_ids=[[5], [5] * 9000, [6]], sampling_params=ONE)


def test_program_beyond_the_context(runtime: Any) -> None:
    @rt.function
    def long(s: Any, text: str) -> None:
        s += "short"
        s += rt.gen("fine", max_tokens=2)
        s += text
        s += rt.gen("never", max_tokens=2)
        s += rt.gen("after", max_tokens=2)

    state = long.run("word " * 9000, backend=runtime, temperature=0.0)
    assert isinstance(state["fine"], str)
    for read in (
        lambda: state["never"],
        lambda: state["after"],
        state.text,
        state.sync,
        lambda: state.get_meta_info("never"),
        lambda: list(state.text_iter("never")),
    ):
        with pytest.raises(rt.ContextLengthError, match="8192"):
            read()
    error = state.error()
    assert isinstance(error, rt.ContextLengthError)
    assert "test_bad_input.py" in str(error), "the error does not name the line"


def test_select_beyond_the_context(runtime: Any) -> None:
    @rt.function
    def long(s: Any) -> None:
        s += "short"
        s += rt.select("pick", [" a", " word" * 9000])

    state = long.run(backend=runtime)
    with pytest.raises(rt.ContextLengthError):
        _ = state["pick"]


def test_a_context_of_ones_own() -> None:
    """Asking for more tokens than fit is no error: the answer ends where the context does."""
    greedy = {"temperature": 0.0, "max_new_tokens": 5000, "ignore_eos": True}
    with rt.Runtime(dtype="float32", context_length=64, max_total_tokens=512) as runtime:
        assert runtime.context_length == 64
        assert runtime.server_info()["context_length"] == 64
        for size in (40, 63):
            ids = list(range(100, 100 + size))
            meta = runtime.generate(input_ids=ids, sampling_params=greedy)["meta_info"]
            assert meta["completion_tokens"] == 64 - size
            assert meta["finish_reason"] == {"type": "length"}
        for size in (64, 65):
            with pytest.raises(rt.ContextLengthError, match="64"):
                runtime.generate(input_ids=list(range(size)), sampling_params=ONE)
        score = {"max_new_tokens": 0}
        meta = runtime.generate(
            input_ids=list(range(64)), sampling_params=score, return_logprob=True,
            logprob_start_len=0,
        )["meta_info"]  # fmt: skip
        assert len(meta["input_token_logprobs"]) == 64
        still_works(runtime)


def test_more_than_the_memory_holds() -> None:
    """A request that can never fit fails alone, with the setting that would help."""
    with rt.Runtime(dtype="float32", max_total_tokens=256) as runtime:
        with pytest.raises(rt.ContextLengthError, match="max_total_tokens"):
            runtime.generate(input_ids=list(range(300)), sampling_params=ONE)
        with pytest.raises(rt.ContextLengthError, match="max_total_tokens"):
            runtime.generate(
                input_ids=list(range(200)),
                sampling_params={"max_new_tokens": 500, "ignore_eos": True},
            )
        still_works(runtime)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("no-such-model", "no-such-model"),
        ("/no/such/folder", "/no/such/folder"),
        ("/no/such/file.gguf", "file.gguf"),
    ],
)
def test_unknown_model(model: str, names: str) -> None:
    with pytest.raises(rt.ModelError, match=names):
        rt.Runtime(model)


def test_files_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(rt.ModelError):
        rt.Runtime(str(tmp_path))
    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"GGUF" + b"\xff" * 100)
    with pytest.raises(rt.ModelError):
        rt.Runtime(str(junk))
    (tmp_path / "config.json").write_text('{"architectures": ["NobodyKnowsForCausalLM"]}')
    with pytest.raises(rt.ModelError):
        rt.Runtime(str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"no_such_setting": 1}, "no_such_setting"),
        ({"context_length": 0}, "context_length"),
        ({"context_length": 99999}, "context_length"),
        ({"dtype": "float13"}, "dtype"),
        ({"max_total_tokens": -5}, "max_total_tokens"),
        ({"device": "toaster"}, "device"),
    ],
)
def test_bad_settings(settings: dict[str, Any], names: str) -> None:
    with pytest.raises((rt.BadInputError, TypeError), match=names):
        rt.Runtime(**settings)


@pytest.mark.parametrize(
    ("sampling", "names"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -7}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"presence_penalty": -3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-46}, "repetition_penalty"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"min_new_tokens": 9, "max_new_tokens": 3}, "min_new_tokens"),
        ({"n": 0}, "n must"),
        ({"n": 100000}, "n must"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [49152]}, "stop_token_ids"),
        ({"logit_bias": {49152: 1.0}}, "logit_bias"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias"),
        ({"logit_bias": {5: float("inf")}}, "logit_bias"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias"),
        ({"logit_bias": {5: -1e39}}, "logit_bias"),
        ({"seed": 2**70}, "seed"),
        ({"top_logprobs_num": 1000}, "top_logprobs_num"),
        ({"no_such_parameter": 1}, "no_such_parameter"),
    ],
)
def test_bad_sampling(sampling: dict[str, Any], names: str, runtime: Any) -> None:
    with pytest.raises(rt.BadInputError, match=names):
        runtime.generate("a", sampling_params={"max_new_tokens": 1, **sampling})


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: rt.gen("x", max_tokens=-1), "max_new_tokens"),
        (lambda: rt.gen("x", temperature=-0.5), "temperature"),
        (lambda: rt.gen("x", top_p=7), "top_p"),
        (lambda: rt.gen("x", stop=[""]), "stop"),
        (lambda: rt.gen(5), "name"),  # type: ignore[arg-type]
        (lambda: rt.gen("x", choices=[]), "choices"),
        (lambda: rt.select("x", []), "choices"),
        (lambda: rt.select("x"), "choices"),
        (lambda: rt.select("x", "yes"), "choices"),
        (lambda: rt.select("x", ["yes", None]), "choices"),  # type: ignore[list-item]
        (lambda: rt.select("x", ["a"], temperature=0.7), "temperature"),
        (lambda: rt.select("x", ["a"], choices_method="mine"), "choices_method"),  # type: ignore[arg-type]
        (lambda: rt.user(None), "None"),  # type: ignore[arg-type]
        (lambda: rt.user(["a"]), "list"),  # type: ignore[arg-type]
    ],
)
def test_bad_expressions_name_their_line(make: Callable[[], Any], names: str) -> None:
    with pytest.raises(ValueError, match=names) as caught:
        make()
    assert isinstance(caught.value, rt.BadInputError)
    assert "test_bad_input.py" in str(caught.value)


@pytest.mark.parametrize(
    "value", [None, 5, ["a"], {"a": 1}, b"a", object()], ids=lambda v: type(v).__name__
)
def test_what_cannot_be_appended(value: Any, runtime: Any) -> None:
    @rt.function
    def appends(s: Any) -> None:
        s += "before"
        s += value

    with pytest.raises(rt.BadInputError, match="append") as caught:
        appends.run(backend=runtime)
    assert "test_bad_input.py" in str(caught.value)


def test_an_empty_choice(runtime: Any) -> None:
    @rt.function
    def picks(s: Any) -> None:
        s += "A"
        s += rt.select("x", ["", "b"])

    with pytest.raises(rt.BadInputError, match="empty"):
        _ = picks.run(backend=runtime)["x"]


def test_a_value_that_is_never_generated(runtime: Any) -> None:
    @rt.function
    def reads(s: Any) -> None:
        s += "A" + rt.gen("x", max_tokens=2)
        _ = s["y"]

    with pytest.raises(rt.MissingValueError, match="'y'") as caught:
        reads.run(backend=runtime)
    assert isinstance(caught.value, KeyError)
    assert isinstance(caught.value, rt.ProgramError)

    @rt.function
    def short(s: Any) -> None:
        s += "A" + rt.gen("x", max_tokens=2)

    state = short.run(backend=runtime)
    for read in (
        lambda: state["y"],
        lambda: state.get_meta_info("y"),
        lambda: state.value("y"),
        lambda: list(state.text_iter("y")),
    ):
        with pytest.raises(KeyError, match="y"):
            read()
    assert "y" not in state
    assert "x" in state


def test_functions_without_a_state() -> None:
    with pytest.raises(rt.ProgramError, match="'s'") as caught:

        @rt.function
        def wrong(state: Any) -> None:
            pass

    assert "test_bad_input.py" in str(caught.value)
    with pytest.raises(rt.ProgramError, match="'s'"):
        rt.function(lambda: None)


def test_wrong_arguments(runtime: Any) -> None:
    @rt.function
    def two(s: Any, a: str, b: str) -> None:
        s += a + b

    for args, kwargs in (((), {}), (("x",), {}), (("x", "y", "z"), {}), (("x", "y"), {"c": 1})):
        with pytest.raises(TypeError, match="two"):
            two.run(*args, **{"backend": runtime, **kwargs})
    with pytest.raises(TypeError, match="item 1"):
        two.run_batch([{"a": "x", "b": "y"}, {"a": "x"}], backend=runtime)
    with pytest.raises(rt.BadInputError, match="temperature"):
        two.run("x", "y", backend=runtime, temperature=-3)


def test_no_backend() -> None:
    @rt.function
    def nothing(s: Any) -> None:
        s += "x"

    rt.set_default_backend(None)
    with pytest.raises(rt.BackendError, match="no backend"):
        nothing.run()


@pytest.mark.parametrize(
    ("ask", "names"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "input_ids": [1]}, "prompt"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"input_ids": [49152]}, "input_ids"),
        ({"input_ids": ["a"]}, "input_ids"),
        ({"input_ids": 5}, "input_ids"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"prompt": ["a", "b"], "rid": ["r", "r"]}, "rid"),
    ],
)
def test_bad_requests(ask: dict[str, Any], names: str, runtime: Any) -> None:
    with pytest.raises(rt.BadInputError, match=names):
        runtime.generate(**ask)


def test_a_rid_in_use(runtime: Any) -> None:
    stream = runtime.generate(
        "Once", sampling_params={"max_new_tokens": 200, "ignore_eos": True}, stream=True, rid="mine"
    )
    next(stream)
    with pytest.raises(rt.ProgramError, match="mine"):
        runtime.generate("Twice", sampling_params=ONE, rid="mine")
    stream.close()


def test_wrong_constraints_are_refused_by_name(runtime: Any) -> None:
    @rt.function
    def constrained(s: Any) -> None:
        s += rt.gen("x", regex="[ab]+(?<!b)", max_tokens=3)

    with pytest.raises(rt.GrammarError, match=r"look-behind.*character 5, .*test_bad_input\.py"):
        _ = constrained.run(backend=runtime)["x"]
    with pytest.raises(rt.BadInputError, match="json_schema"):
        rt.gen("x", regex="a", json_schema="{}")


def test_one_bad_branch_costs_the_others_nothing(
    runtime: Any, oracle: Any, greedy_cases: Any
) -> None:
    case = greedy_cases[0]

    @rt.function
    def branches(s: Any) -> None:
        good, bad = s.fork(2)
        bad += "word " * 9000
        bad += rt.gen("x", max_tokens=2)
        good += case["prompt"]
        good += rt.gen("x", max_tokens=12, return_logprob=True)
        s += "end"
        s["good"] = good["x"]
        s["ids"] = [t for _, t, _ in good.get_meta_info("x")["output_token_logprobs"]]

    state = branches.run(backend=runtime, temperature=0.0)
    oracle.ids(case, state["ids"], 12)
    assert isinstance(state.error(), rt.ContextLengthError)
    assert state.text() == "end"


def test_one_bad_item_costs_the_batch_nothing(runtime: Any) -> None:
    @rt.function
    def tell(s: Any, text: str) -> None:
        s += text
        s += rt.gen("x", max_tokens=2)

    states: Any = tell.run_batch(
        [{"text": "The sky is"}, {"text": "word " * 9000}, {"text": "The sea is"}],
        backend=runtime,
        temperature=0.0,
    )
    assert isinstance(states[0]["x"], str)
    assert isinstance(states[2]["x"], str)
    with pytest.raises(rt.ContextLengthError):
        _ = states[1]["x"]
