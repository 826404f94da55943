from __future__ import annotations

import pytest
import ramet as rt


@rt.function
def f(s):
    s += "q" + rt.gen("a", stop=".") + rt.select("b", ["no", "yes"]) + rt.gen()


def test_answers_by_text_list_index_and_function(scripted):
    backend = scripted({"a": ["1. cut", "2"], "b": 1, None: lambda prompt: prompt[0]})
    assert f.run(backend=backend).text() == "q1yesq"
    assert f.run(backend=backend).text() == "q2yesq"


def test_functions_can_ask_for_the_whole_call(scripted):
    def choose(call):
        assert call.kind == "select"
        return call.choices[0]

    backend = scripted({"a": lambda call: call.name, "b": choose}, default="end")
    assert f.run(backend=backend).text() == "qanoend"


def test_a_function_that_asks_for_explanations_runs_without_a_cache(scripted):
    backend = scripted({"a": "1", "b": "no"}, default="")
    state = f.run(backend=backend, explain=True)
    assert state.text() == "q1no"
    assert backend.calls[0].sampling.explain is True
    assert "explain" not in state.get_meta_info("b")


def test_calls_record_what_was_asked(scripted):
    backend = scripted({"a": "1", "b": "no"}, default="")
    f.run(backend=backend, temperature=0.5)
    one, two, three = backend.calls
    assert (one.kind, one.name, one.prompt, one.sampling.stop) == ("gen", "a", "q", (".",))
    assert one.sampling.temperature == 0.5
    assert (two.kind, two.choices, two.method) == (
        "select",
        ("no", "yes"),
        "token_length_normalized",
    )
    assert (three.name, three.prompt) == (None, "q1no")


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({}, "no answer for 'a'"),
        ({"a": []}, "only 0 answers for 'a'"),
        ({"a": 3}, "must be a string"),
        ({"a": "1", "b": "maybe"}, "none of"),
        ({"a": "1", "b": 2}, "none of"),
        ({"a": rt.BackendError("made up")}, "made up"),
        ({"a": lambda _: 1 / 0}, "ZeroDivisionError"),
    ],
)
def test_what_the_script_lacks_is_an_error(scripted, answers, message):
    state = f.run(backend=scripted(answers))
    with pytest.raises(rt.RametError, match=message):
        state.text()
