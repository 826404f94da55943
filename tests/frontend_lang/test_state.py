from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest
import ramet as rt
from ramet.runtime.program.executor import GenResult
from ramet.runtime.protocol import FinishReason, MetaInfo


@dataclass
class Point:
    x: int
    y: int


def _run(body, backend, **kwargs):
    return rt.function(body).run(backend=backend, **kwargs)


def test_text_values_and_messages(scripted):
    def body(s):
        s += rt.system("Be brief.")
        s += rt.user("Capital of France?")
        s += rt.assistant("It is " + rt.gen("city", max_tokens=8) + ".")

    state = _run(body, scripted({"city": "Paris"}))
    assert state["city"] == "Paris"
    assert state.text() == (
        "<system>Be brief.</system>\n<user>Capital of France?</user>\n"
        "<assistant>It is Paris.</assistant>\n"
    )
    assert state.messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Capital of France?"},
        {"role": "assistant", "content": "It is Paris."},
    ]
    assert state.error() is None
    assert "city" in state
    assert "town" not in state
    assert state.get("town", "?") == "?"


@pytest.mark.parametrize("bad", [None, 3, ["a"], object()])
def test_what_cannot_be_appended_names_the_line(scripted, bad):
    def body(s):
        s += bad

    with pytest.raises(ValueError, match=r"test_state\.py:\d+") as caught:
        _run(body, scripted())
    assert isinstance(caught.value, rt.ProgramError)
    if bad is None:
        assert "None" in str(caught.value)


@pytest.mark.parametrize("size", [0, -1, 1.5, "2", None, 10**7])
def test_forks_of_no_such_size(scripted, size):
    with pytest.raises(rt.BadInputError, match=r"fork needs.*test_state\.py:\d+"):
        _run(lambda s: s.fork(size), scripted())


def test_a_variable_is_named_by_a_string(scripted):
    with pytest.raises(rt.BadInputError, match=r"not 5.*test_state\.py:\d+"):
        _run(lambda s: s.__setitem__(5, "a"), scripted())


@pytest.mark.parametrize(
    ("name", "value"),
    [("timeout", "a"), ("timeout", float("nan")), ("timeout", True), ("cache_salt", 5)],
)
def test_what_a_run_cannot_begin_with(scripted, name, value):
    with pytest.raises(rt.BadInputError) as caught:
        _run(lambda s: None, scripted(), **{name: value})
    assert caught.value.param == name


def test_a_backend_is_one():
    for backend in (5, "tcp://x", rt.Runtime):
        with pytest.raises(rt.BadInputError, match="backend must be"):
            _run(lambda s: None, backend)
        with pytest.raises(rt.BadInputError, match="backend must be"):
            rt.set_default_backend(backend)


def test_a_value_never_generated_names_itself_and_the_known(scripted):
    state = _run(lambda s: s.__iadd__(rt.gen("a") + rt.gen("b")), scripted({"a": "1", "b": "2"}))
    with pytest.raises(KeyError, match=r"'c'.*a, b") as caught:
        state["c"]
    assert isinstance(caught.value, rt.ProgramError)
    for read in (state.get_meta_info, state.value, state.ref):
        with pytest.raises(rt.MissingValueError, match="'c'"):
            read("c")


def test_reading_a_missing_value_inside_does_not_hang(scripted):
    def body(s):
        s += rt.gen("a")
        s["b"]

    with pytest.raises(KeyError, match="'b'"):
        _run(body, scripted({"a": "1"}))


def test_an_error_is_raised_at_every_reader(scripted):
    def body(s):
        s += rt.gen("a")
        s += "x" + rt.gen("b")
        s += rt.gen("c")

    state = _run(body, scripted({"a": "1", "b": rt.ContextLengthError("too long"), "c": "3"}))
    assert state["a"] == "1"
    for read in (
        lambda: state["b"],
        lambda: state["c"],
        state.text,
        state.sync,
        lambda: state.get_meta_info("c"),
        lambda: "c" in state,
        lambda: list(state.text_iter("b")),
    ):
        with pytest.raises(rt.ContextLengthError, match=r"too long \(at test_state\.py:\d+\)"):
            read()
    assert isinstance(state.error(), rt.ContextLengthError)


def test_an_error_reaches_readers_inside_the_function(scripted):
    def body(s):
        s += rt.gen("a")
        s["a"]

    with pytest.raises(rt.BackendError, match="gone"):
        _run(body, scripted({"a": rt.BackendError("gone")}))


def test_a_wrong_constraint_is_raised_where_its_value_is_read(scripted):
    def body(s):
        s += rt.gen("a", regex=r"[0-9]+\b")

    state = _run(body, scripted({"a": "1"}))
    with pytest.raises(rt.GrammarError, match=r"word boundary.*character 6, .*test_state\.py"):
        state["a"]


def test_variables_that_python_sets(scripted):
    def body(s):
        s["x"] = ["any", "object"]
        s["y"] = "text"
        s += "got " + s["y"] + rt.gen("a")
        child = s.fork(1)[0]
        child += s.ref("y")
        return child.text()

    state = _run(body, scripted({"a": "!"}))
    assert state["x"] == ["any", "object"]
    assert state.ret_value == "got text!text"


@pytest.mark.parametrize("name", [3, None, ["x"]])
def test_names_are_strings(scripted, name):
    def program(s):
        with s.var_scope(name):
            s += "x"

    with pytest.raises(rt.BadInputError, match=r"must be a string, not .*test_state\.py:"):
        rt.function(program).run(backend=scripted({}))


def test_var_scope_collects_what_is_inside(scripted):
    def body(s):
        s += "("
        with s.var_scope("inner"):
            s += "a" + rt.gen("x") + "b"
        s += ")"

    state = _run(body, scripted({"x": "1"}))
    assert state["inner"] == "a1b"
    assert state.text() == "(a1b)"


def test_roles_as_blocks_and_as_methods(scripted):
    def body(s):
        with s.system():
            s += "S"
        s.user("U")
        with s.assistant():
            s += rt.gen("x")

    state = _run(body, scripted({"x": "A"}))
    assert [m["content"] for m in state.messages()] == ["S", "U", "A"]


def test_begin_and_end_pairs_make_the_same_program(scripted):
    def pairs(s):
        s += rt.system_begin() + "S" + rt.system_end()
        s += rt.user_begin() + "U"
        s += rt.user_end()
        s += rt.assistant_begin() + rt.gen("x") + rt.assistant_end()

    def calls(s):
        s += rt.system("S") + rt.user("U") + rt.assistant(rt.gen("x"))

    one, other = (_run(body, scripted({"x": "A"})) for body in (pairs, calls))
    assert one.text() == other.text()
    assert one.messages() == other.messages()


def test_a_block_closes_its_message_when_the_body_raises(scripted):
    def body(s):
        try:
            with s.user():
                s += "half"
                raise RuntimeError("oops")
        except RuntimeError:
            pass
        s += rt.assistant(rt.gen("x"))

    state = _run(body, scripted({"x": "A"}))
    assert state.messages()[0] == {"role": "user", "content": "half"}


@pytest.mark.parametrize(
    "expr",
    [
        lambda: rt.user(rt.system("x")),
        lambda: rt.user_begin() + rt.user_begin(),
        lambda: rt.user_begin() + rt.assistant_end(),
        lambda: rt.user_end(),
    ],
)
def test_roles_do_not_nest(scripted, expr):
    def body(s):
        s += expr()

    with pytest.raises(rt.ProgramError, match=r"message.*test_state\.py"):
        _run(body, scripted())


def test_samples_give_a_list_and_the_text_goes_on_with_the_first(scripted):
    def body(s):
        s += "q:" + rt.gen("x", n=3) + "."

    state = _run(body, scripted({"x": ["a", "b", "c"]}))
    assert state["x"] == ["a", "b", "c"]
    assert len(state.get_meta_info("x")) == 3
    assert state.text() == "q:a."


def test_values_are_typed_by_their_dtype(scripted):
    def body(s):
        s += rt.gen("t", dtype=int) + rt.gen("b", dtype=bool) + rt.gen("l", dtype=float, n=2)
        s += rt.gen("c", dtype=Literal["a", "b"]) + rt.gen("j", json_schema={"type": "array"})
        s += rt.gen("p", json_schema=Point) + rt.gen("r", regex="[0-9]+")
        s["g"] = 5

    answers = {"t": "42 ", "b": "maybe", "l": ["1.5", "2"], "c": "b", "j": "[1, 2]", "r": "7"}
    state = _run(body, scripted(answers | {"p": '{"x":1,"y":2}'}))
    assert (state.value("t"), state["t"]) == (42, "42")
    assert state.value("l") == [1.5, 2.0]
    assert (state.value("c"), state.value("j"), state.value("r")) == ("b", [1, 2], "7")
    assert (state.value("p"), state["p"]) == (Point(1, 2), '{"x":1,"y":2}')
    assert state.value("g") == 5
    with pytest.raises(rt.ProgramError, match="'b' is no bool: 'maybe'"):
        state.value("b")


@pytest.mark.parametrize("stream", [False, True])
def test_a_value_that_was_cut_says_so(scripted, monkeypatch, stream):
    def cut(text, _):
        reason = FinishReason("length" if text.startswith("{") else "stop")
        return GenResult(text, MetaInfo(finish_reason=reason, completion_tokens=3))

    monkeypatch.setattr("ramet.testing._cut", cut)

    def body(s):
        s += rt.gen("p", json_schema=Point)
        s += rt.gen("many", json_schema={"type": "array"}, n=2) + rt.gen("ended", dtype=bool)
        forks = s.fork(2)
        forks += rt.gen("q", json_schema=Point)
        forks.join()

    answers = {"p": '{"x":', "many": ["[]", '{"y"'], "ended": "maybe", "q": '{"z":'}
    state = _run(body, scripted(answers | {"q": ['{"x":1,"y":2}', '{"z":']}), stream=stream)
    state.sync()
    how = r"; it was cut after 3 tokens \(finish reason length\): raise max_tokens$"
    with pytest.raises(rt.ProgramError, match="'p' is no Point: '{\"x\":'" + how):
        state.value("p")
    with pytest.raises(rt.ProgramError, match="'many' is no JSON: '{\"y\"'" + how):
        state.value("many")
    with pytest.raises(rt.ProgramError, match="'q' is no Point: '{\"z\":'" + how):
        state.value("q")
    with pytest.raises(rt.ProgramError, match=r"'ended' is no bool: 'maybe'$"):
        state.value("ended")


def test_meta_info_of_gen_and_select(scripted):
    def body(s):
        s += rt.gen("x", stop="!") + rt.select("y", ["no", "yes"])

    state = _run(body, scripted({"x": "hey! you", "y": "yes"}))
    assert state["x"] == "hey"
    meta = state.get_meta_info("x")
    assert meta["finish_reason"] == {"type": "stop", "matched": "!"}
    assert state["y"] == "yes"
    meta = state.get_meta_info("y")
    assert meta["choices"] == ["no", "yes"]
    assert meta["normalized_prompt_logprobs"] == [-1.0, 0.0]


def test_rebinding_reads_as_python_does(scripted):
    def body(s):
        seen = []
        for _ in range(3):
            s += rt.gen("x")
            seen.append(s["x"])
        return seen

    state = _run(body, scripted({"x": ["a", "b", "c"]}))
    assert state.ret_value == ["a", "b", "c"]
    assert state["x"] == "c"


def test_text_in_the_middle(scripted):
    def body(s):
        s += "a" + rt.gen("x")
        first = s.text()
        s += "b"
        return first, s.text(), s.text()

    assert _run(body, scripted({"x": "1"})).ret_value == ("a1", "a1b", "a1b")


def test_a_program_that_has_ended_takes_no_more(scripted):
    state = _run(lambda s: None, scripted())
    with pytest.raises(rt.ProgramError, match="ended"):
        state += "x"
    assert state.text() == ""
    assert state.messages() == []


def test_references_of_other_programs_are_refused(scripted):
    backend = scripted({"x": "1"})
    other = _run(lambda s: s.__iadd__(rt.gen("x")), backend)
    reference = other.ref("x")

    def body(s):
        s += "a" + reference

    with pytest.raises(rt.ProgramError, match="another program"):
        _run(body, backend)


def test_private_use_characters_are_ordinary_text(scripted):
    state = _run(lambda s: s.__iadd__("\t\ue0f0aZ12\ue0f1\t"), scripted())
    assert state.text() == "\t\ue0f0aZ12\ue0f1\t"
