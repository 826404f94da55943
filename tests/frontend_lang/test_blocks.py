"""Switches and loops in programs: lazily they just run, compiled they are recorded as blocks."""

from __future__ import annotations

import enum

import pytest
import ramet as rt
from ramet.runtime.program.instructions import Bind, Condition, Ref, Repeat, Switch, Text


class Mood(enum.Enum):
    GOOD = "good"
    BAD = "bad"


@rt.function
def react(s, question):
    s += "Question: " + question + "\n"

    def turn(s):
        s += "Thought " + s["turn"] + ":" + rt.gen("thought") + "\n"
        s += "Act:" + rt.select("act", ["look", "stop"]) + "\n"
        s.switch(
            s["act"],
            {"look": lambda s: s.__iadd__("Seen: " + rt.gen("seen") + "\n")},
            "Answer: " + rt.gen("answer"),
        )

    s.repeat(turn, 4, until=lambda s: rt.matches(s["act"], "stop"), count="turn")
    s += " after " + s["thought"]
    return s["answer"]


ANSWERS = {
    "thought": [" one", " two", " three"],
    "act": ["look", "look", "stop"],
    "seen": ["this", "that"],
    "answer": "42",
}


def both(program, answers, **arguments):
    """The state of a lazy run and of a compiled one, whose calls are the same."""
    found, calls = [], []
    for way in (program, program.compile()):
        backend = rt.testing.ScriptedBackend(answers)
        found.append(way.run(**arguments, backend=backend))
        calls.append(sorted((c.kind, c.name, c.prompt) for c in backend.calls))
        assert backend.open_contexts == 0
    assert calls[0] == calls[1]
    return found


def test_an_agent_is_the_same_lazily_and_compiled():
    lazy, whole = both(react, ANSWERS, question="why?")
    assert whole.text() == lazy.text()
    assert "Thought 3: three\nAct:stop\nAnswer: 42 after  three" in whole.text()
    for state in (lazy, whole):
        assert state["turn"] == "3"
        assert state["thought"] == " three"
        assert state["seen"] == "that"
        assert state.ret_value == "42"
        assert state.history("thought") == [" one", " two", " three"]
        assert state.history("turn") == ["1", "2", "3"]
        assert state.get_meta_info("answer")["finish_reason"]["type"] == "stop"
        assert state.error() is None


def test_a_compiled_agent_is_one_message(spy):
    backend = spy(ANSWERS)
    react.compile().run("why?", backend=backend)
    assert len(backend.sent) == 1


def test_a_loop_ends_after_its_times():
    answers = {"thought": ["."] * 4, "act": ["look"] * 4, "seen": ["s"] * 4}
    with pytest.raises(rt.MissingValueError, match="'answer' was never"):
        react.run("q", backend=rt.testing.ScriptedBackend(answers))
    whole = react.compile().run("q", backend=rt.testing.ScriptedBackend(answers))
    assert whole["turn"] == "4"
    assert "answer" not in whole
    assert whole.get("answer") is None
    with pytest.raises(rt.MissingValueError, match=r"'answer' was never.*thought"):
        _ = whole["answer"]
    with pytest.raises(rt.MissingValueError):
        whole.get_meta_info("answer")


@pytest.mark.parametrize(
    ("match", "taken"),
    [("strip", "one two three"), ("exact", "- two -"), ("contains", "one one three")],
)
def test_what_matches(match, taken):
    @rt.function
    def program(s, value):
        s.switch(value, {"yes": "one", " no ": "two", 3: "three"}, "-", match=match)

    compiled = program.compile()
    for way in (program, compiled):
        backend = rt.testing.ScriptedBackend()
        values = {"strip": [" yes\n", "no", "3 "], "exact": ["yes\n", " no ", "+3"]}
        chosen = values.get(match, ["oh yes!", "yes", "13"])
        texts = [way.run(value, backend=backend).text() for value in chosen]
        assert " ".join(texts) == taken


def test_values_of_types_are_compared_as_they_are_written():
    @rt.function
    def program(s):
        s += rt.gen("mood", dtype=Mood) + rt.gen("many", dtype=int) + rt.gen("sure", dtype=bool)
        s.switch(s["mood"], {Mood.GOOD: "+", Mood.BAD: "-"})
        s.switch(s["many"], {1: "one", 2: "two"})
        s.switch(s["sure"], {True: "sure", False: "unsure"})

    for state in both(program, {"mood": "bad", "many": "2", "sure": "False"}):
        assert state.text().endswith("-twounsure")
    backend = rt.testing.ScriptedBackend({"mood": "bad", "many": "2", "sure": "False"})

    @rt.function
    def by_value(s):
        s += rt.gen("mood", dtype=Mood)
        s.switch(s.value("mood"), {Mood.GOOD: "+", Mood.BAD: "-"})

    assert by_value.run(backend=backend).text() == "bad-"


def test_switches_on_arguments_compile_too():
    @rt.function
    def program(s, style):
        s.switch(style, {"long": rt.gen("a", max_tokens=100), "short": rt.gen("a", max_tokens=5)})

    backend = rt.testing.ScriptedBackend({"a": "text"})
    compiled = program.compile()
    for style, size in (("long", 100), ("short", 5)):
        assert compiled.run(style, backend=backend)["a"] == "text"
        assert backend.calls[-1].sampling.max_new_tokens == size
    assert "a" not in compiled.run("other", backend=backend)


def test_what_was_read_before_a_loop_stays_what_it_was():
    @rt.function
    def program(s):
        s["x"] = "first"
        before = s["x"]

        def turn(s):
            began = s["x"]
            s += f"[{before} {began} " + rt.gen("x")
            s += f" {began} {before} {s['x']}]"

        s.repeat(turn, 3)
        s += before + s["x"]

    lazy, whole = both(program, {"x": ["a", "b", "c"]})
    want = "[first first a first first a][first a b a first b][first b c b first c]firstc"
    assert lazy.text() == whole.text() == want
    assert whole["x"] == "c"


def test_a_search_forks_in_every_turn():
    @rt.function
    def search(s):
        s += "Start."

        def turn(s):
            forks = s.fork(2)
            for number, fork in enumerate(forks):
                fork += f" ({number})" + rt.gen("plan")
            s["first"] = forks[0]["plan"]
            forks.join()
            s += " Best:" + rt.select("best", ["0", "1"])
            s.switch(s["best"], {"0": " zero " + s["first"], "1": " one"})

        s.repeat(turn, 2)
        return s["first"]

    answers = {"plan": lambda prompt: f"<{len(prompt)}>", "best": ["1", "0"]}
    lazy, whole = both(search, answers)
    assert lazy.text() == whole.text()
    assert whole["plan"] == lazy["plan"]
    assert len(whole["plan"]) == 2
    assert whole.history("plan") == lazy.history("plan")
    assert lazy.ret_value == whole.ret_value


def test_arms_that_open_messages_and_scopes():
    @rt.function
    def program(s, kind):
        def ask(s):
            s += rt.user("Why?") + rt.assistant(rt.gen("why"))

        def tell(s):
            with s.var_scope("all"):
                s += rt.user("Because.")

        s.switch(kind, {"ask": ask, "tell": tell})

    answers = {"why": "so"}
    for kind in ("ask", "tell"):
        lazy, whole = both(program, answers, kind=kind)
        assert whole.messages() == lazy.messages() != []
        assert whole.text() == lazy.text()
        assert ("all" in whole) == ("all" in lazy) == (kind == "tell")


def test_a_listing_sets_blocks_in():
    lines = str(react.compile()).splitlines()
    at = next(i for i, line in enumerate(lines) if "repeat" in line)
    assert "4 times counted in turn" in lines[at]
    assert lines[at + 1].startswith('   0    text       "Thought " {turn@0} ":"')
    assert any(line.split() == ["case", '"look"'] for line in lines)
    assert any(line.split() == ["until", "{act@0}", "is", '"stop"'] for line in lines)
    assert any(line.startswith("   0      gen      answer") for line in lines)


def test_blocks_as_data():
    @rt.function
    def program(s):
        s += rt.gen("x")
        s.repeat(lambda s: s.switch(s["x"], {"a": "b"}), 3, until=lambda s: rt.matches(s["x"], "c"))

    _, repeat, *_ = program.compile().program.instructions
    assert isinstance(repeat, Repeat)
    assert repeat.until == Condition(value=(Ref(0, "x"),), texts=("c",))
    assert repeat.times == 3
    (switch,) = repeat.body
    assert isinstance(switch, Switch)
    assert switch.cases["a"][0].parts == ("b",)
    assert switch.default == ()
    assert repeat.line.startswith("test_blocks.py:")
    assert switch.line.startswith("test_blocks.py:")
    assert max(i.op for i in (switch, *switch.cases["a"])) < repeat.op


def test_no_copy_is_made_of_what_nobody_reads():
    @rt.function
    def program(s):
        s["x"] = "1"
        s.repeat(rt.gen("x"), 2)

    kinds = [type(i) for i in program.compile().program.instructions]
    assert kinds.count(Bind) == 1
    assert Text not in kinds


# --- what cannot be -------------------------------------------------------------------------------


def compile_of(body):
    @rt.function
    def program(s):
        s += rt.gen("x")
        body(s)

    with pytest.raises(rt.RametError, match=r"test_blocks\.py:\d+") as error:
        program.compile()
    return error.value.message


def test_a_loop_needs_a_condition_that_can_be_sent():
    message = compile_of(lambda s: s.repeat("a", 2, until=lambda s: True))
    assert "rt.matches" in message
    message = compile_of(lambda s: s.repeat("a", 2, until=lambda s: s["x"] == "a"))
    assert "a comparison" in message
    message = compile_of(lambda s: s.repeat("a", 2, until=lambda s: not rt.matches(s["x"], "a")))
    assert "a truth test" in message


def test_blocks_that_nest_too_deep_name_the_line():
    def nested(depth):
        return (lambda s: s.repeat(nested(depth - 1), 1)) if depth else rt.gen("x")

    assert "nest deeper than 16" in compile_of(nested(17))
    assert "nest deeper than 16" in compile_of(nested(500))
    assert rt.function(lambda s: nested(16)(s)).compile().program.instructions


def test_only_the_blocks_own_branch_grows_in_it():
    def body(s):
        other = s.fork(1)[0]
        s.switch(s["x"], {"a": lambda s: other.__iadd__("no")})

    assert "only the state that it is called with" in compile_of(body)


def test_a_branch_of_a_block_ends_with_it():
    def body(s):
        kept = []

        def arm(s):
            fork = s.fork(1)[0]
            fork += rt.gen("y")
            kept.append((fork, fork["y"]))

        s.switch(s["x"], {"a": arm})
        s += kept[0][1]

    assert "ended with it" in compile_of(body)

    def grow(s):
        kept = []
        s.repeat(lambda s: kept.extend(s.fork(1)), 2)
        kept[0] += "more"

    assert "has ended" in compile_of(grow)


def test_a_message_that_begins_in_a_block_ends_in_it():
    message = compile_of(lambda s: s.switch(s["x"], {"a": rt.user_begin()}))
    assert "a user message is open" in message


def test_an_object_that_a_loop_reads_must_not_change_there():
    def body(s):
        s["n"] = 0

        def turn(s):
            s["n"] = s["n"] + 1

        s.repeat(turn, 3)

    assert "'n' is no text before the loop" in compile_of(body)


def test_a_program_of_its_own_cannot_be_called_in_a_block():
    @rt.function
    def other(s):
        s += "other"

    assert "f(s, ...)" in compile_of(lambda s: s.repeat(lambda s: other(), 2))

    @rt.function
    def program(s):
        s.repeat(other, 2)

    for state in both(program, {}):
        assert state.text() == "otherother"


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda s: s.switch(["a"], {"a": "b"}), "a list cannot be compared"),
        (lambda s: s.switch("a", ["a"]), "cases must be a dict"),
        (lambda s: s.switch("a", {"a": 3}), "cannot append a int"),
        (lambda s: s.switch("a", {1: "b", "1": "c"}), "case '1' is there twice"),
        (lambda s: s.switch("a", {"a": "b"}, match="regex"), "match must be one of strip"),
        (lambda s: s.repeat("a", 0), "times must be a whole number from 1"),
        (lambda s: s.repeat("a", True), "times must be a whole number from 1"),
        (lambda s: s.repeat("a", 10**9), "times must be a whole number from 1"),
        (lambda s: s.repeat(lambda s: rt.gen("x"), 2), "must append it"),
        (lambda s: s.repeat("a", 2, until=rt.matches("a", "b")), "until must be a function"),
        (lambda s: s.repeat("a", 2, count=3), "name must be a string, not 3"),
        (lambda s: rt.matches("a"), "matches needs a text"),
    ],
)
def test_bad_input_names_the_line(call, what):
    @rt.function
    def program(s):
        call(s)

    for way in (lambda: program.run(backend=rt.testing.ScriptedBackend()), program.compile):
        with pytest.raises(ValueError, match=what) as error:
            way()
        assert "test_blocks.py:" in str(error.value)


def test_an_error_in_a_turn_is_raised_where_its_values_are_read():
    @rt.function
    def program(s):
        s += rt.gen("a")
        s.repeat(rt.gen("x") + rt.gen("y"), 3)

    answers = {"a": "a", "x": ["1", "2", "3"], "y": ["1", rt.ModelError("broke")]}
    state = program.compile().run(backend=rt.testing.ScriptedBackend(answers))
    assert state["a"] == "a"
    for read in (lambda: state["x"], lambda: state["y"], state.text, state.sync):
        with pytest.raises(rt.ModelError, match=r"broke.*test_blocks\.py:"):
            read()
    assert isinstance(state.error(), rt.ModelError)


def test_a_condition_is_a_bool_where_the_value_is_known():
    assert rt.matches(" yes\n", "no", "yes")
    assert not rt.matches(" yes", "yes", match="exact")
    assert rt.matches("Finish[4]", "Finish[", match="contains")
    assert repr(rt.matches("a", "b", 1)) == "matches('a', 'b', '1')"


def test_a_reference_is_waited_for_when_it_decides():
    @rt.function
    def program(s):
        s += rt.gen("x")
        s.switch(s.ref("x") + "!", {"a!": "right"}, "wrong")
        s.repeat(rt.gen("y"), 3, until=lambda s: rt.matches(s.ref("y"), "2"))

    state = program.run(backend=rt.testing.ScriptedBackend({"x": "a", "y": ["1", "2", "3"]}))
    assert state.text() == "aright12"


def test_deltas_of_a_compiled_loop_come_as_they_are_made():
    backend = rt.testing.ScriptedBackend(ANSWERS)
    state = react.compile().run("why?", backend=backend, stream=True)
    events = [(event.variable, event.delta) for event in state.events()]
    assert "".join(delta for _, delta in events) == state.text()
    assert [delta for name, delta in events if name == "thought"] == [" one", " two", " three"]
    assert "".join(state.text_iter()) == state.text()
    assert list(state.text_iter("thought")) == [" three"]
