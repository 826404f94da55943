"""Switch and repeat as data: what runs, what is reported, what is refused."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from ramet.runtime.program.ahead import Ahead
from ramet.runtime.program.blocks import most_reads
from ramet.runtime.program.events import Entered, Synced, TextDelta, Value
from ramet.runtime.program.instructions import (
    Arg,
    Bind,
    Condition,
    End,
    Fork,
    Gen,
    Join,
    Program,
    Ref,
    Repeat,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    Switch,
    Sync,
    Text,
)
from ramet.runtime.program.intake import Intake
from ramet.runtime.program.limits import Limits
from ramet.runtime.protocol import MissingValueError, ProgramError, RametError


def text(*parts, stream=0):
    return Text(stream=stream, parts=parts)


def until(name, *texts):
    return Condition(value=(Ref(0, name),), texts=texts)


def entered(outcome):
    return [(e.op, e.case, e.turn) for e in outcome.events if isinstance(e, Entered)]


def values(outcome, op):
    return {e.name: e.value for e in outcome.events if isinstance(e, Value) and e.op == op}


def scripted(runs, *answers):
    """Generations answer one of these after the other."""
    left = list(answers)
    runs.executor.script = lambda *_: left.pop(0)


@pytest.mark.parametrize(
    ("value", "case", "got"),
    [("yes", "yes", "1"), (" no\n", "no", "2"), ("maybe", None, "3")],
)
async def test_a_switch_takes_the_first_case_that_matches(runs, value, case, got):
    cases = {"yes": (text("1"),), "no": (text("2"),)}
    switch = Switch(op=1, value=(Arg("v"),), cases=cases, default=(text("3"),))
    outcome = await runs.whole(
        text("a"), switch, text("b"), Sync(op=2, want="text"), args={"v": value}
    )
    assert outcome.synced(2).text == f"a{got}b"
    assert entered(outcome) == [(1, case, 0)]
    assert outcome.executor.leaked == 0


async def test_a_switch_without_a_match_does_nothing(runs):
    switch = Switch(op=1, value=("x",), cases={" x": (text("1"),)}, match="exact")
    outcome = await runs.whole(switch, Sync(op=2, want="text"))
    assert outcome.synced(2).text == ""
    assert not outcome.failed()


async def test_a_loop_runs_until_its_condition_holds(runs):
    scripted(runs, "a", "b", "stop", "never")
    loop = Repeat(
        op=9,
        body=(Gen(op=1, name="x"), text("[", Ref(0, "n"), "]")),
        times=10,
        until=until("x", "stop"),
        count="n",
    )
    outcome = await runs.whole(loop, text(Ref(0, "x"), Ref(0, "n")), Sync(op=2, want="text"))
    assert outcome.synced(2).text == "a[1]b[2]stop[3]stop3"
    assert entered(outcome) == [(9, None, 1), (9, None, 2), (9, None, 3)]
    assert values(outcome, 9) == {"x": "stop", "n": "3"}
    got = [e for e in outcome.events if isinstance(e, Value) and e.op == 1]
    assert [e.value for e in got] == ["a", "b", "stop"]
    (last,) = [e for e in outcome.events if isinstance(e, Value) and e.op == 9 and e.name == "x"]
    assert last.meta == got[-1].meta is not None
    deltas = [e.text for e in outcome.events if isinstance(e, TextDelta)]
    assert "".join(deltas) == outcome.synced(2).text


async def test_a_turn_reads_what_the_one_before_has_bound(runs):
    loop = Repeat(op=9, times=3, body=(Bind(op=1, name="x", parts=(Ref(0, "x"), "b")),))
    outcome = await runs.whole(
        Bind(op=0, name="x", parts=("a",)), loop, text(Ref(0, "x")), Sync(op=2, want="text")
    )
    assert outcome.synced(2).text == "abbb"


async def test_what_no_arm_has_bound_is_missing(runs):
    cases = {"a": (Gen(op=1, name="x"),)}
    switch = Switch(op=2, value=(Arg("v"),), cases=cases)
    outcome = await runs.whole(switch, Sync(op=3), text(Ref(0, "x")), args={"v": "b"})
    assert values(outcome, 2) == {"x": None}
    (failed,) = outcome.failed().values()
    assert isinstance(failed.error.exception(), MissingValueError)
    assert "'x'" in failed.error.message
    known = await runs.whole(
        Bind(op=0, name="x", parts=("old",)), switch, text(Ref(0, "x")), Sync(op=4, want="text"),
        args={"v": "b"},
    )  # fmt: skip
    assert known.synced(4).text == "old"
    assert values(known, 2) == {"x": "old"}


async def test_forks_in_a_loop_are_new_in_each_turn(runs):
    body = (
        Fork(children=(1, 2)),
        Gen(stream=1, op=1, name="p"),
        text("x", stream=2),
        Gen(stream=2, op=2, name="p"),
        Bind(op=3, name="first", parts=(Ref(1, "p"),)),
        Join(op=4, children=(1, 2)),
        text(Ref(0, "first")),
    )
    outcome = await runs.whole(Repeat(op=9, times=3, body=body), Sync(op=5, want="text"))
    assert not outcome.failed()
    lists = [e.value for e in outcome.events if isinstance(e, Value) and (e.op, e.name) == (4, "p")]
    assert len(lists) == len({tuple(found) for found in lists}) == 3
    assert outcome.synced(5).text == "".join(found[0] for found in lists)
    assert values(outcome, 9)["p"] == lists[-1]
    assert outcome.executor.leaked == 0
    assert len(outcome.executor.contexts) == 7
    assert outcome.executor.peak == 2


async def test_a_turn_ends_when_its_forks_have(runs):
    """So that two turns never use a number of a stream at the same time."""
    runs.executor.turns = lambda: 5
    body = (Fork(children=(1,)), Gen(stream=1, op=1, name="p"))
    outcome = await runs.whole(Repeat(op=9, times=3, body=body))
    assert outcome.executor.peak == 1
    kinds = [type(e).__name__ for e in outcome.events if isinstance(e, Entered | Value)]
    assert kinds == ["Entered", "Value"] * 3


async def test_a_failed_fork_that_nobody_joins_harms_only_itself(runs):
    body = (Fork(children=(1,)), RoleBegin(stream=1, role="nobody"), text("a"))
    outcome = await runs.whole(Repeat(op=9, times=2, body=body), Sync(op=2, want="text"))
    assert set(outcome.failed()) == {1}
    assert outcome.synced(2).text == "aa"


async def test_blocks_nest_and_read_streams_around_them(runs):
    scripted(runs, "1", "2", "1", "2")
    inner = Switch(
        op=5,
        value=(Ref(0, "x"),),
        cases={"1": (text(Ref(1, "other")),)},
        default=(Repeat(op=6, times=2, body=(text("-", Ref(1, "other")),)),),
    )
    outcome = await runs.whole(
        Fork(children=(1,)),
        Bind(stream=1, op=0, name="other", parts=("o",)),
        Repeat(op=7, times=2, body=(Gen(op=3, name="x"), inner)),
        Bind(stream=1, op=1, name="other", parts=("later",)),
        Sync(op=2, want="text"),
    )
    assert outcome.synced(2).text == "1o2-o-o"
    assert [op for op, _, _ in entered(outcome)] == [7, 5, 7, 5, 6, 6]


async def test_loops_in_forks_run_at_the_same_time(runs):
    runs.executor.turns = lambda: 3
    loops = [
        Repeat(stream=n, op=10 + n, times=3, body=(Gen(stream=n, op=n, name="x"),)) for n in (1, 2)
    ]
    outcome = await runs.whole(Fork(children=(1, 2)), *loops, Join(op=3, children=(1, 2)))
    assert outcome.executor.peak == 2
    (joined,) = [e for e in outcome.events if isinstance(e, Value) and e.op == 3]
    assert len(joined.value) == 2
    assert not outcome.failed()


async def test_an_arm_not_taken_is_a_none_among_joined(runs):
    arms = [
        Switch(stream=n, op=10 + n, value=(str(n),), cases={"1": (Gen(stream=n, op=n, name="x"),)})
        for n in (1, 2)
    ]
    outcome = await runs.whole(Fork(children=(1, 2)), *arms, Join(op=3, children=(1, 2)))
    (joined,) = [e for e in outcome.events if isinstance(e, Value) and e.op == 3]
    assert [value is None for value in joined.value] == [False, True]


async def test_a_failure_in_a_turn_fails_what_the_loop_binds(runs):
    scripted(runs, "a")  # the second turn finds no answer
    loop = Repeat(op=9, times=3, body=(Gen(op=1, name="x", line="f.py:3"),), line="f.py:2")
    outcome = await runs.whole(
        Fork(children=(1,)), loop, text(Ref(0, "x"), stream=1), Sync(stream=1, op=2, want="text")
    )
    failed = outcome.failed()
    assert (failed[0].op, failed[0].error.where) == (1, "f.py:3")
    assert failed[1].error.message == failed[0].error.message
    assert values(outcome, 9) == {}
    assert outcome.executor.leaked == 0


async def test_in_pieces_it_is_the_same(new_runs):
    instructions = [
        Gen(op=0, name="x"),
        Repeat(op=9, times=3, body=(Gen(op=1, name="x"), text(Ref(0, "x")))),
        text(Ref(0, "x")),
        Sync(op=2, want="text"),
    ]
    whole = await new_runs().whole(*instructions)
    for turns in (0, 1, 30):
        pieces = await new_runs().pieces([[one] for one in instructions], turns)
        assert pieces.synced(2).text == whole.synced(2).text
        assert pieces.done.error is None


async def test_cancelled_in_a_loop_nothing_is_held(runs):
    runs.executor.turns = lambda: 3
    body = (Fork(children=(1,)), Gen(stream=1, op=1, name="x"), Join(op=2, children=(1,)))
    interpreter, _ = runs.start()
    interpreter.feed((Repeat(op=9, times=10_000, body=body),), True)
    task = asyncio.create_task(interpreter.run())
    for _ in range(100):
        await asyncio.sleep(0)
    interpreter.cancel()
    await asyncio.wait_for(task, 5)
    assert runs.executor.running == 0
    assert all(context.closed == 1 for context in runs.executor.contexts)


async def test_a_loop_that_waits_for_nothing_holds_up_nobody(runs):
    interpreter, _ = runs.start()
    interpreter.feed((Repeat(op=9, times=10_000, body=(text("a"),)),), True)
    task = asyncio.create_task(interpreter.run())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not task.done()
    interpreter.cancel()
    await task


# --- bounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "what"),
    [
        ({"instructions": 50}, "more than 50 instructions"),
        ({"streams": 20}, "more than 20 streams"),
        ({"text_bytes": 90}, "text exceeds 90 bytes"),
    ],
)
async def test_loops_cannot_explode(runs, limits, what):
    body = (Fork(children=(1,)), text("abcd"))
    inner = Repeat(op=8, times=10, body=body)
    outcome = await runs.whole(Repeat(op=9, times=10, body=(inner,)), limits=Limits(**limits))
    assert what in outcome.failed()[0].error.message
    assert outcome.executor.leaked == 0


async def test_searching_values_counts_as_text(runs):
    cases = {str(n): () for n in range(100)}
    switch = Switch(op=1, value=("a" * 100,), cases=cases, match="contains")
    outcome = await runs.whole(switch, limits=Limits(text_bytes=5000))
    assert "exceeds" in outcome.failed()[0].error.message


def nested(levels):
    one = text("a")
    for _ in range(levels):
        one = Repeat(times=1, body=(one,))
    return one


@pytest.mark.parametrize(
    ("instructions", "what"),
    [
        ([Repeat(times=0, body=())], "times must be 1 to"),
        ([Repeat(times=10_001, body=())], "times must be 1 to"),
        ([nested(17)], "blocks nest deeper than 16"),
        ([Gen(op=1), Repeat(times=2, body=(Gen(op=1),))], "op 1 is used twice"),
        ([Repeat(times=2, body=(Gen(op=1), Gen(op=1)))], "op 1 is used twice"),
        ([Fork(children=(1,)), Repeat(times=2, body=(text("a", stream=1),))], "not of this block"),
        ([Repeat(times=2, body=(text("a", stream=7),))], "stream 7 does not exist"),
        ([Repeat(times=2, body=(End(),))], "cannot end inside a block"),
        ([Repeat(times=2, body=(RoleBegin(role="user"),))], "role 'user' is open"),
        ([RoleBegin(role="user"), Repeat(times=2, body=(RoleEnd(role="user"),))], "no role is"),
        ([Repeat(times=2, body=(ScopeBegin(name="v"),))], "scope 'v' is open"),
        ([ScopeBegin(name="v"), Repeat(times=2, body=(ScopeEnd(name="v"),))], "is innermost"),
        ([Fork(children=(1,)), Repeat(times=2, body=(Join(children=(1,)),))], "is no child"),
        ([Repeat(times=2, body=(Fork(children=(1,)),)), text("a", stream=1)], "is of a block"),
        ([Repeat(times=2, body=(Fork(children=(1,)),)), text(Ref(1, "x"))], "is of a block"),
        ([Repeat(times=2, body=(Fork(children=(1,)),)), Fork(children=(1,))], "exists already"),
        ([Switch(value=("a",), cases={"a": (Fork(children=(1,)),), "b": (text(Ref(1, "x")),)})],
         "is of a block"),
        ([Switch(value=("a",), cases={"a": (Repeat(times=0, body=()),)})], "times must be"),
        ([Switch(value=(Ref(3, "x"),))], "stream 3 does not exist"),
        ([Repeat(times=2, body=(), until=until("x", "y")),
          Repeat(times=2, body=(), until=Condition(value=(Ref(4, "x"),), texts=()))],
         "stream 4 does not exist"),
    ],
)  # fmt: skip
def test_what_no_program_may_hold_is_refused_at_once(instructions, what):
    intake = Intake.of({}, Limits())
    with pytest.raises(ProgramError, match=what):
        for instruction in instructions:
            intake.take(instruction)


def test_a_program_nested_too_deep_is_no_crash():
    data = {"type": "text", "parts": ["a"]}
    for _ in range(100):
        data = {"type": "repeat", "times": 1, "body": [data]}
    program = msgspec.convert({"instructions": [data]}, Program)
    with pytest.raises(RametError, match="nest deeper"):
        Intake.of({}, Limits()).take(program.instructions[0])


# --- as data --------------------------------------------------------------------------------------


def test_the_json_form():
    program = Program(
        instructions=(
            Switch(op=2, value=(Ref(0, "x"),), cases={"a": (text("b"),)}, match="contains"),
            Repeat(op=3, body=(Gen(op=1, name="x"),), times=3, until=until("x", "a"), count="n"),
        )
    )
    data = msgspec.json.decode(msgspec.json.encode(program))
    assert data["instructions"] == [
        {
            "type": "switch",
            "op": 2,
            "value": [{"type": "ref", "stream": 0, "name": "x"}],
            "cases": {"a": [{"type": "text", "parts": ["b"]}]},
            "match": "contains",
        },
        {
            "type": "repeat",
            "op": 3,
            "body": [{"type": "gen", "op": 1, "name": "x"}],
            "times": 3,
            "until": {"value": [{"type": "ref", "stream": 0, "name": "x"}], "texts": ["a"]},
            "count": "n",
        },
    ]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(program), type=Program) == program
    for wrong in ({"match": "regex"}, {"cases": {"a": [{"type": "nothing"}]}}, {"cases": ["a"]}):
        bad = {"instructions": [data["instructions"][0] | wrong]}
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(bad, Program)


# --- look-ahead -----------------------------------------------------------------------------------


def test_what_is_to_come_is_the_most_there_can_be():
    loop = Repeat(
        times=5,
        body=(
            Gen(),
            Switch(value=("a",), cases={"a": (Gen(), Select(choices=(("x",),)))}, default=(Gen(),)),
        ),
    )
    assert most_reads([loop]) == 15
    assert most_reads([Repeat(times=10_000, body=(Repeat(times=10_000, body=(Gen(),) * 99),))]) == (
        1 << 31
    )
    ahead = Ahead()
    taken = Intake.of({}, Limits()).take(loop)
    ahead.add(taken)
    assert ahead.remaining == 15
    ahead.drop(taken)
    assert ahead.remaining == 0


async def test_what_is_to_come_shrinks_as_the_loop_goes_on(runs):
    told = []
    plain = runs.executor.open

    def watched(*args):
        context = plain(*args)
        context.expect = lambda remaining, reads: told.append((remaining, reads))
        context.rest = lambda: None
        return context

    runs.executor.open = watched
    scripted(runs, "a", "a", "stop", "end")
    loop = Repeat(
        op=9,
        times=5,
        body=(Gen(op=1, name="x"), Switch(value=("y",), cases={"z": (Gen(op=2),)})),
        until=until("x", "stop"),
    )
    await runs.whole(loop, Gen(op=3), Sync(op=4))
    assert told == [(10, True), (8, True), (6, True), (0, False)]


async def test_syncs_in_a_loop_report_each_turn(runs):
    loop = Repeat(op=9, times=2, body=(text("a"), Sync(op=1, want="text")))
    outcome = await runs.whole(loop)
    assert [e.text for e in outcome.events if isinstance(e, Synced)] == ["a", "aa"]
