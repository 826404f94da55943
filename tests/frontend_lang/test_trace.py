from __future__ import annotations

import pytest
import ramet as rt
from hypothesis import given, settings
from hypothesis import strategies as st
from ramet.runtime.program.instructions import Arg, Bind, Fork, Program, Ref, Text


@rt.function
def tips(s, topic, count=2):
    s += rt.system("Be terse.")
    s += rt.user(f"Give {count} tips about {topic}.")
    forks = s.fork(count)
    for i, branch in enumerate(forks):
        branch += rt.assistant(f"Tip {i + 1}: " + rt.gen("tip", max_tokens=9, stop="\n"))
    s += rt.assistant(
        "1. " + forks[0]["tip"] + f"\n2. {forks[1]['tip']}\nBest: " + rt.select("best", ["1", "2"])
    )
    return forks[0]["tip"], {"best": s["best"], "topic": topic}


ANSWERS = {"tip": lambda prompt: f"<{prompt[-3]}>", "best": "2"}


def test_lazy_and_compiled_ask_for_the_same(scripted):
    one, other = scripted(ANSWERS), scripted(ANSWERS)
    lazy = tips.run("sleep", backend=one)
    compiled = tips.compile().run("sleep", backend=other)
    assert compiled.text() == lazy.text()
    assert compiled.messages() == lazy.messages()
    assert compiled["best"] == lazy["best"] == "2"
    assert compiled.ret_value == lazy.ret_value == ("<1>", {"best": "2", "topic": "sleep"})

    def asked(backend):
        return sorted((c.kind, c.name, c.prompt, c.choices) for c in backend.calls)

    assert asked(one) == asked(other)


def test_a_compiled_program_is_one_message(spy):
    backend = spy(ANSWERS)
    tips.compile().run(topic="sleep", backend=backend)
    assert len(backend.sent) == 1
    assert backend.sent[0][1] is True


def test_symbols_become_arguments_and_references():
    program = tips.compile().program
    assert isinstance(program, Program)
    assert program.args == ("topic",)
    texts = [i.parts for i in program.instructions if isinstance(i, Text)]
    assert ("Give 2 tips about ", Arg("topic"), ".") in texts
    assert ("1. ", Ref(1, "tip"), "\n2. ", Ref(2, "tip"), "\nBest: ") in texts


def test_a_listing_is_one_instruction_a_line():
    compiled = tips.compile()
    lines = str(compiled).splitlines()
    assert lines[0] == "program tips(topic)"
    assert len(lines) == 1 + len(compiled.program.instructions)
    assert any('2  gen          tip max_new_tokens=9 stop="\\n"' in line for line in lines)
    assert any("{tip@1}" in line and "test_trace.py:" in line for line in lines)
    assert str(tips.trace()) == str(compiled)


def test_constants_are_given_when_compiling(scripted):
    backend = scripted({"tip": lambda _: "t", "best": "1"})
    compiled = tips.compile(count=3, topic="x")
    assert compiled.program.args == ()
    assert compiled.run(backend=backend)["best"] == "1"
    assert sum(call.name == "tip" for call in backend.calls) == 3
    with pytest.raises(ValueError, match="'count' was fixed"):
        tips.compile().run("x", count=4, backend=backend)
    with pytest.raises(ValueError, match="'topic'"):
        tips.compile().run(backend=backend)
    with pytest.raises(ValueError, match="2 arguments"):
        tips.compile().run("x", 4, backend=backend)
    assert tips.bind(topic="b").compile().program.args == ()


def test_compile_at_the_first_run(spy):
    traced = []

    @rt.function(compile=True)
    def f(s, word, times=1):
        traced.append(times)
        for _ in range(times):
            s += word + rt.gen("x")

    backend = spy({"x": lambda _: "!"})
    assert f.run("a", backend=backend).text() == "a!"
    assert f.run("b", backend=backend).text() == "b!"
    assert f.run("c", times=2, backend=backend).text() == "c!c!"
    assert [s.text() for s in f.run_batch([("d",), ("e",)], backend=backend)] == ["d!", "e!"]
    assert traced == [1, 2]


OPERATIONS = {
    "comparison": lambda v: v == "a",
    "order": lambda v: v < "a",
    "truth": lambda v: bool(v),
    "not": lambda v: not v,
    "if": lambda v: 1 if v else 2,
    "len": len,
    "iteration": list,
    "index": lambda v: v[0],
    "slice": lambda v: v[1:],
    "int": int,
    "float": float,
    "range": range,
    "add a number": lambda v: v + 1,
    "times": lambda v: v * 2,
    "times from the left": lambda v: 2 * v,
    "minus": lambda v: v - 1,
    "upper": lambda v: v.upper(),
    "strip": lambda v: v.strip(),
    "split": lambda v: v.split(),
    "format": lambda v: f"{v:>5}",
    "format width": lambda v: "{:5}".format(v),  # noqa: UP032
    "in": lambda v: "a" in v,
    "look-up": lambda v: {"a": 1}.get(v),
    "percent": lambda v: v % 3,
    "negative": lambda v: -v,
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS.keys())
@pytest.mark.parametrize("what", ["argument", "value"])
def test_what_needs_a_value_is_an_error_naming_the_line(operation, what):
    @rt.function
    def f(s, word):
        s += rt.gen("x")
        operation(word if what == "argument" else s["x"])

    with pytest.raises((rt.ProgramError, TypeError)) as caught:
        f.compile()
    if not isinstance(caught.value, TypeError):
        assert "test_trace.py:" in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda v: f"{v}".upper(),
        lambda v: f"{v}".lower(),
        lambda v: f"{v}".strip(),
        lambda v: f"{v}"[:10],
        lambda v: f"{v}"[3:],
        lambda v: f"{v}".replace(f"{v}"[4:9], "x"),
        lambda v: f"{v}".title(),
        repr,
    ],
)
def test_what_changes_a_symbol_inside_text_is_noticed(change):
    @rt.function
    def f(s, word):
        s += "see " + change(word)

    if change is repr:
        assert "{word}" in str(f.compile())
        return
    with pytest.raises(rt.ProgramError, match="changed"):
        f.compile()


@pytest.mark.parametrize(
    "build",
    [
        lambda v: f"<{v}>",
        lambda v: "<" + v + ">",
        lambda v: "{}{}{}".format("<", v, ">"),
        lambda v: "<%s>" % v,  # noqa: UP031
        lambda v: "".join(["<", v, ">"]),
        lambda v: "<" + str(v) + ">",
        lambda v: f"  <{v}>  ".strip(),
    ],
)
def test_ways_to_put_a_symbol_into_text(scripted, build):
    @rt.function
    def f(s, word):
        s += build(word) + rt.gen("x")
        s += build(s["x"])

    assert f.compile().run("w", backend=scripted({"x": "1"})).text() == "<w>1<1>"


def test_questions_are_not_known_while_compiling():
    for ask in (
        lambda s: s.text(),
        lambda s: s.messages(),
        lambda s: s.error(),
        lambda s: s.get_meta_info("x"),
        lambda s: s.text_iter(),
        lambda s: s.sync(),
    ):

        @rt.function
        def f(s, ask=ask):
            s += rt.gen("x")
            ask(s)

        with pytest.raises(rt.ProgramError, match="compiled"):
            f.compile()


def test_lists_are_not_one_text():
    @rt.function
    def f(s):
        s += rt.gen("x", n=2)
        s += s["x"]

    with pytest.raises(rt.ProgramError, match=r"'x' is a list.*fork.*join them and select"):
        f.compile()

    @rt.function
    def chosen(s):
        s += rt.gen("x", n=2)
        s += rt.select("best", s["x"])

    with pytest.raises(rt.ProgramError, match="fork a branch for each"):
        chosen.compile()


def test_the_best_of_several_samples_goes_on(scripted):
    @rt.function
    def f(s):
        s += "q: "
        branches = s.fork(2)
        for number, branch in enumerate(branches):
            branch += rt.gen("a", seed=number)
        branches.join()
        s += rt.select("best", s["a"]) + "."

    answers = {"a": lambda call: f"a{call.sampling.seed}", "best": 1}
    for program in (f, f.compile()):
        state = program.run(backend=scripted(answers))
        assert (state["best"], state.text()) == ("a1", "q: a1.")


def test_a_reference_means_what_it_meant_when_it_was_taken(scripted):
    @rt.function
    def f(s):
        s += rt.gen("x")
        first = s["x"]
        s += rt.gen("x")
        s += "|" + first + s["x"]
        return first

    compiled = f.compile()
    assert any(isinstance(i, Bind) for i in compiled.program.instructions)
    backend = scripted({"x": ["a", "b"]})
    assert compiled.run(backend=backend).text() == "ab|ab"
    assert f.run(backend=scripted({"x": ["a", "b"]})).text() == "ab|ab"


def test_joined_lists_can_be_used_while_compiling(scripted):
    @rt.function
    def f(s):
        forks = s.fork(3)
        forks += lambda i: f"{i}" + rt.gen("x")
        forks.join()
        s += ", ".join(s["x"])

    backend = scripted({"x": lambda prompt: prompt * 2})
    assert f.compile().run(backend=backend).text() == "00, 11, 22"


def test_choices_may_hold_symbols(scripted):
    @rt.function
    def f(s, one):
        s += rt.gen("x")
        s += rt.select("y", [one, "b " + s["x"]])

    backend = scripted({"x": "1", "y": 1})
    assert f.compile().run("a", backend=backend).text() == "1b 1"
    assert backend.calls[1].choices == ("a", "b 1")


def test_a_program_called_while_compiling_becomes_a_branch(scripted):
    @rt.function
    def inner(s, word):
        s += "inner " + word + rt.gen("i")

    @rt.function
    def outer(s, topic):
        s += "outer " + topic
        child = inner(topic)
        s += "/" + child["i"] + rt.gen("o")

    compiled = outer.compile()
    assert isinstance(compiled.program.instructions[0], Fork)
    backend = scripted({"i": "I", "o": "O"})
    assert compiled.run("t", backend=backend).text() == "outer t/IO"
    prompts = {call.name: call.prompt for call in backend.calls}
    assert prompts == {"i": "inner t", "o": "outer t/I"}


@pytest.mark.parametrize("stream", [False, True])
def test_branches_that_a_compiled_program_returns_can_be_read(scripted, stream):
    @rt.function
    def f(s):
        s += "p"
        forks = s.fork(2)
        forks += lambda i: f"{i}" + rt.gen("x")
        return forks, s.copy()

    state = f.compile().run(backend=scripted({"x": lambda p: p[-1]}), stream=stream)
    forks, copied = state.ret_value
    assert [branch.text() for branch in forks] == ["p00", "p11"]
    assert [branch["x"] for branch in forks] == ["0", "1"]
    assert ["".join(branch.text_iter()) for branch in forks] == ["p00", "p11"]
    assert copied.text() == "p"
    with pytest.raises(rt.ProgramError, match="ended"):
        forks[0] += "more"
    with pytest.raises(rt.ProgramError, match="ended"):
        forks.join()


def test_cache_prefills_the_constant_beginning(scripted):
    backend = scripted()
    tips.cache(backend)
    assert [(c.kind, c.prompt) for c in backend.calls] == [
        ("warm", "<system>Be terse.</system>\n<user>Give 2 tips about ")
    ]


def test_cache_of_a_program_that_cannot_be_compiled(scripted):
    @rt.function
    def f(s, word):
        s += "shots: a b c\n" + rt.gen("x")
        if s["x"] == "1":
            s += "never"

    backend = scripted()
    f.cache(backend)
    assert [c.prompt for c in backend.calls] == ["shots: a b c\n"]

    @rt.function
    def nothing(s, word):
        s += word

    nothing.cache(backend)
    assert len(backend.calls) == 1


def test_data_dependent_programs_say_so():
    @rt.function
    def f(s):
        s += rt.gen("x")
        while s["x"] != "stop":
            s += rt.gen("x")

    with pytest.raises(rt.ProgramError, match=r"comparison.*test_trace\.py"):
        f.compile()


def test_a_compiled_program_survives_its_data_form(scripted):
    import msgspec

    program = tips.compile().program
    assert msgspec.json.decode(msgspec.json.encode(program), type=Program) == program


steps = st.lists(
    st.tuples(st.sampled_from(["text", "arg", "gen", "ref", "fork", "user", "scope"]), st.text()),
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_any_program_is_the_same_lazy_and_compiled(steps):
    @rt.function
    def f(s, arg):
        for kind, text in steps:
            if kind == "text":
                s += text
            elif kind == "arg":
                s += f"{text}{arg}"
            elif kind == "gen":
                s += rt.gen("g")
            elif kind == "ref":
                s += "=" + (s["g"] if "g" in s._branch.names else "none")
            elif kind == "user":
                s += rt.user(text + rt.gen("g"))
            elif kind == "scope":
                with s.var_scope("scope"):
                    s += text + rt.gen("g")
            else:
                forks = s.fork(2)
                forks += lambda i, text=text: text + f"{i}" + rt.gen("f")
                s += forks[0]["f"] + "".join([forks[1]["f"], arg])
                forks.join()

    def run(run):
        backend = rt.testing.ScriptedBackend(
            {"g": lambda p: f"g{len(p)}", "f": lambda p: f"f{len(p)}{p[-1:]}"}
        )
        state = run("A", backend=backend)
        calls = sorted((call.name, call.prompt) for call in backend.calls)
        return state.text(), state.messages(), calls, backend.open_contexts

    assert run(f.run) == run(f.compile().run)
