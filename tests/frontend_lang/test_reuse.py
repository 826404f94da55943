"""Fixed text behind variable text, found in programs."""

from __future__ import annotations

import ramet as rt
from ramet.reuse import LEAST_TOKENS, findings
from ramet.runtime.program.instructions import Program

RULES = "one two three four five six seven eight nine ten eleven twelve. " * 2
WORDS = 24


def words(text: str) -> int:
    return len(text.split())


def of(function: rt.Function, least: int = LEAST_TOKENS, **given: object):
    return findings(function.trace(**given).program, words, least)


def test_an_argument_before_fixed_text():
    @rt.function
    def program(s, date, question):
        s += "Today is " + date
        s += RULES
        s += question + " Answer:" + rt.gen("answer")

    (found,) = of(program)
    assert (found.variable, found.kind) == ("{date}", "the argument")
    assert (found.shared, found.gained, found.prompts) == (2, WORDS + 1, 1)
    assert [run.tokens for run in found.behind] == [WORDS, 1]
    assert found.where.startswith("test_reuse.py:")
    assert found.where < found.behind[0].where


def test_the_other_order_is_no_finding():
    @rt.function
    def program(s, date):
        s += RULES + "Today is " + date + ". Answer:" + rt.gen("answer")

    assert of(program) == []
    assert [found.gained for found in of(program, 1)] == [2]


def test_text_behind_a_generation_stays_where_it_is():
    @rt.function
    def program(s, question):
        s += question + rt.gen("draft")
        s += RULES + rt.gen("final")

    assert of(program) == []


def test_a_value_of_another_branch_before_fixed_text():
    @rt.function
    def program(s):
        (child,) = s.fork(1)
        child += "Think: " + rt.gen("idea")
        s += child["idea"]
        s += RULES
        s += rt.gen("answer")

    (found,) = of(program)
    assert (found.kind, found.shared, found.gained) == ("the value", 0, WORDS)
    assert found.variable.startswith("{idea@")


def test_branches_that_begin_alike_are_one_finding():
    @rt.function
    def program(s, topic):
        s += "About " + topic + " "
        for number, branch in enumerate(s.fork(3)):
            branch += RULES * (number + 1) + rt.gen("tip")

    (found,) = of(program)
    assert (found.prompts, found.shared, found.gained) == (3, 1, 3 * WORDS)


def test_messages_end_a_run_of_text():
    @rt.function
    def program(s, name):
        s += rt.system(name + RULES)
        s += rt.user(RULES)
        s += rt.assistant(rt.gen("answer"))

    (found,) = of(program)
    assert [run.tokens for run in found.behind] == [WORDS, WORDS]


def test_fixed_arguments_are_fixed_text():
    @rt.function
    def program(s, date):
        s += date + RULES + rt.gen("answer")

    assert of(program, date="Monday") == []
    assert len(of(program)) == 1


def test_choices_and_joined_text_end_a_prompt():
    @rt.function
    def select(s, name):
        s += name + rt.select("which", ["a", "b"])
        s += RULES + rt.gen("rest")

    @rt.function
    def join(s, name):
        forks = s.fork(1)
        forks += name + rt.gen("x")
        forks.join("concate_and_append")
        s += RULES + rt.gen("rest")

    assert of(select) == []
    assert of(join) == []


def test_a_program_that_was_cut_counts_without_a_generation():
    @rt.function
    def program(s, name):
        s += name + RULES

    assert of(program) == []
    (found,) = findings(program.trace().program, words, cut=True)
    assert found.gained == WORDS


def test_an_empty_program_has_none():
    assert findings(Program(), words) == []


def test_arms_and_loops_are_looked_into():
    @rt.function
    def arm(s, kind, date):
        s.switch(kind, {"dated": date + RULES + rt.gen("a")}, rt.gen("b"))

    (found,) = of(arm)
    assert (found.variable, found.shared, found.gained) == ("{date}", 0, WORDS)

    @rt.function
    def turn(s, date):
        s += "Now:"
        s.repeat(lambda s: s.__iadd__(date + RULES + rt.gen("a")), 3)

    (found,) = of(turn)
    assert (found.variable, found.shared, found.gained) == ("{date}", 1, WORDS)


def test_text_that_differs_between_arms_varies():
    @rt.function
    def program(s, style):
        s += "Be brief. "
        s.switch(style, {"kind": "Be kind.", "harsh": "Be harsh."})
        s += RULES + rt.gen("a")

    (found,) = of(program)
    assert (found.variable, found.kind, found.shared) == ("{style}", "the argument", 2)
    assert found.gained == WORDS

    @rt.function
    def same(s, style):
        s.switch(style, {"kind": rt.gen("a"), "harsh": rt.gen("a")}, RULES)
        s += "No answer yet?" + rt.gen("b")

    assert of(same) == []
