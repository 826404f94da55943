"""What goes wrong in a program goes wrong where it should, and nowhere else."""

from __future__ import annotations

import asyncio

import pytest
from ramet.runtime.program.events import Done, Entered, Value
from ramet.runtime.program.instructions import (
    Arg,
    Bind,
    End,
    Fork,
    Gen,
    Join,
    Ref,
    Repeat,
    RoleBegin,
    RoleEnd,
    ScopeEnd,
    Select,
    Sync,
    Text,
)
from ramet.runtime.program.limits import Limits
from ramet.runtime.protocol import BackendError, ProgramError

FORK = Fork(children=(1, 2))


@pytest.mark.parametrize(
    ("instructions", "complaint"),
    [
        ([Text(stream=3, parts=("x",))], "stream 3 does not exist"),
        ([Gen(op=1), Gen(op=1)], "op 1 is used twice"),
        ([RoleBegin(role="user"), RoleBegin(role="system")], "roles do not nest"),
        ([RoleEnd(role="user")], "no role is open"),
        ([RoleBegin(role="user"), RoleEnd(role="system")], "'system' cannot end"),
        ([FORK, Fork(children=(2,))], "stream 2 exists already"),
        ([FORK, Join(stream=1, children=(2,))], "stream 2 is no child of stream 1"),
        ([Join(children=(9,))], "stream 9 is no child"),
        ([FORK, Join(children=(1,)), Join(children=(1,))], "joined already"),
        ([FORK, Join(children=(1,)), Gen(stream=1)], "stream 1 has ended"),
        ([End(), Gen()], "stream 0 has ended"),
        ([ScopeEnd(name="x")], "no variable scope 'x'"),
        ([Text(parts=(Ref(4, "x"),))], "stream 4 does not exist"),
    ],
)
async def test_nonsense_is_refused_and_ends_the_program(runs, instructions, complaint):
    interpreter, events = runs.start()
    task = asyncio.create_task(interpreter.run())
    with pytest.raises(ProgramError, match=complaint):
        interpreter.feed(instructions, False)
    await asyncio.wait_for(task, 1)
    assert complaint in events[-1].error.message
    assert runs.executor.leaked == 0


async def test_feeding_a_closed_program_is_refused(runs):
    interpreter, _ = runs.start()
    interpreter.feed([Gen(op=1)], True)
    with pytest.raises(ProgramError, match="closed"):
        interpreter.feed([Gen(op=2)], True)
    await interpreter.run()


async def test_an_unbound_name_fails_its_instruction_and_names_it(runs):
    outcome = await runs.whole(
        Gen(op=1, name="x"),
        Text(op=2, parts=(Ref(0, "y"),), line="tips.py:7"),
        Gen(op=3, name="z"),
    )
    error = outcome.failed()[0].error
    assert error.kind == "missing_value"
    assert (error.where, error.param) == ("tips.py:7", "y")
    assert "'y'" in error.message
    assert "x" in error.message
    assert outcome.value(1)
    assert not [e for e in outcome.events if isinstance(e, Value) and e.op == 3]
    assert outcome.done.error is None


async def test_a_name_bound_only_later_does_not_count(runs):
    outcome = await runs.whole(Text(parts=(Ref(0, "x"),)), Gen(op=1, name="x"))
    assert outcome.failed()[0].error.kind == "missing_value"


async def test_a_missing_argument_is_named(runs):
    outcome = await runs.whole(Text(parts=(Arg("topic"),), line="a.py:1"))
    error = outcome.failed()[0].error
    assert (error.kind, error.param, error.where) == ("bad_input", "topic", "a.py:1")


async def test_a_list_cannot_be_referred_to_as_text(runs):
    outcome = await runs.whole(
        Gen(op=1, name="x", sampling={"n": 2}), Text(parts=(Ref(0, "x"),), line="a.py:3")
    )
    error = outcome.failed()[0].error
    assert error.kind == "program"
    assert "'x' holds a list" in error.message
    assert error.where == "a.py:3"


@pytest.mark.parametrize(
    ("sampling", "word"), [({"temperature": -1}, "temperature"), ({"tempratur": 1}, "tempratur")]
)
async def test_bad_sampling_fails_with_the_line(runs, sampling, word):
    outcome = await runs.whole(Gen(op=1, name="x", sampling=sampling, line="a.py:5"))
    error = outcome.failed()[0].error
    assert word in error.message
    assert (error.kind, error.where) == ("bad_input", "a.py:5")


async def test_a_wrong_constraint_fails_before_it_is_asked_for(runs):
    constraint = {"kind": "regex", "spec": "a(?=b)"}
    gen = Gen(op=1, name="x", sampling={"constraint": constraint}, line="a.py:5")
    outcome = await runs.whole(gen)
    error = outcome.failed()[0].error
    assert error.kind == "grammar"
    assert "look-ahead" in error.message
    assert error.where == "character 1, a.py:5"


async def test_a_constraint_reaches_the_executor(runs):
    constraint = {"kind": "regex", "spec": "a+"}
    outcome = await runs.whole(Gen(op=1, name="x", sampling={"constraint": constraint}))
    assert not outcome.failed()


async def test_no_choices_is_bad_input(runs):
    outcome = await runs.whole(Select(op=1, name="x", choices=()))
    assert outcome.failed()[0].error.kind == "bad_input"


async def test_other_streams_go_on_and_waiters_get_the_original_error(runs):
    def script(text: str, name: str | None) -> str:
        if name == "bad":
            raise BackendError("it broke", where="origin.py:1")
        return "ok"

    runs.executor.script = script
    outcome = await runs.whole(
        Fork(children=(1, 2, 3)),
        Gen(stream=1, op=1, name="bad", line="a.py:1"),
        Gen(stream=2, op=2, name="good"),
        Text(stream=3, op=3, parts=(Ref(1, "bad"),), line="a.py:9"),
        Bind(op=4, name="v", parts=(Ref(2, "good"),)),
        Join(op=5, children=(2,)),
        Sync(op=6),
        Join(op=7, children=(1,)),
    )
    failed = outcome.failed()
    assert set(failed) == {0, 1, 3}
    assert failed[1].op == 1
    assert failed[3].op == 3
    assert failed[0].op == 7
    assert {f.error.message for f in failed.values()} == {"it broke"}
    assert {f.error.where for f in failed.values()} == {"origin.py:1"}
    assert outcome.value(4) == "ok"
    assert outcome.synced(6)
    assert outcome.executor.leaked == 0


async def test_children_that_never_start_fail_too_and_so_do_their_children(runs):
    outcome = await runs.whole(
        Text(parts=(Ref(0, "nothing"),)),
        Fork(children=(1,)),
        Fork(stream=1, children=(2,)),
        Gen(stream=2, op=1, name="x"),
    )
    failed = outcome.failed()
    assert set(failed) == {0, 1, 2}
    assert {f.error.kind for f in failed.values()} == {"missing_value"}


async def test_what_is_fed_to_a_failed_stream_later_fails_as_well(runs):
    interpreter, events = runs.start()
    task = asyncio.create_task(interpreter.run())
    interpreter.feed([Text(parts=(Ref(0, "nothing"),))], False)
    await asyncio.sleep(0.01)
    interpreter.feed([Gen(op=1, name="x"), Fork(children=(1,))], False)
    interpreter.feed([Text(stream=1, parts=(Ref(0, "x"),))], True)
    await asyncio.wait_for(task, 1)
    assert {e.stream for e in events if type(e).__name__ == "Failed"} == {0, 1}
    assert isinstance(events[-1], Done)


async def test_a_foreign_exception_is_reported_not_swallowed(runs):
    def script(text: str, name: str | None) -> str:
        raise ZeroDivisionError("oh")

    runs.executor.script = script
    outcome = await runs.whole(Gen(op=1, name="x", line="a.py:2"))
    error = outcome.failed()[0].error
    assert "ZeroDivisionError: oh" in error.message
    assert error.where == "a.py:2"


async def test_an_executor_that_cannot_open_ends_the_program(runs):
    def refuse(*_: object) -> None:
        raise BackendError("no engine")

    runs.executor.open = refuse
    outcome = await runs.whole(Gen(op=1))
    assert outcome.done.error.message == "no engine"


async def test_text_is_limited_while_it_grows(runs):
    doubling = [
        part
        for i in range(64)
        for part in (Bind(name="x", parts=(Ref(0, "x"), Ref(0, "x")), op=i + 1),)
    ]
    outcome = await runs.whole(
        Bind(name="x", parts=("é" * 100,)), *doubling, limits=Limits(text_bytes=10_000)
    )
    error = outcome.failed()[0].error
    assert "10000 bytes" in error.message
    assert sum(isinstance(e, Value) for e in outcome.events) < 10


@pytest.mark.parametrize(
    ("limits", "instructions", "complaint"),
    [
        (Limits(streams=3), [Fork(children=(1, 2, 3))], "more than 3 streams"),
        (
            Limits(depth=2),
            [Fork(children=(1,)), Fork(stream=1, children=(2,)), Fork(stream=2, children=(3,))],
            "deeper than 2",
        ),
        (Limits(instructions=2), [Gen(), Gen(), Gen()], "more than 2 instructions"),
    ],
)
async def test_limits_on_shape(runs, limits, instructions, complaint):
    interpreter, events = runs.start(limits=limits)
    with pytest.raises(ProgramError, match=complaint):
        interpreter.feed(instructions, True)
    await interpreter.run()
    assert complaint in events[-1].error.message


async def test_turns_in_which_nothing_is_done_count(runs):
    inner = Repeat(op=1, body=(), times=1000)
    outer = Repeat(op=2, times=1000, body=(inner,), line="loop.py:7")
    outcome = await runs.whole(outer, limits=Limits(instructions=5000))
    assert "more than 5000 instructions" in outcome.failed()[0].error.message
    assert sum(isinstance(event, Entered) for event in outcome.events) < 5001


async def test_a_program_that_takes_too_long_is_aborted(runs):
    runs.executor.turns = lambda: 1_000_000_000
    outcome = await asyncio.wait_for(
        runs.whole(Gen(op=1, name="x"), limits=Limits(seconds=0.05)), 2
    )
    assert outcome.done.error.kind == "aborted"
    assert "0.05 seconds" in outcome.done.error.message
    assert outcome.executor.aborted == 1
    assert outcome.executor.leaked == 0


async def test_cancel_aborts_what_runs_and_says_so_last(runs):
    runs.executor.turns = lambda: 1_000_000_000
    interpreter, events = runs.start()
    task = asyncio.create_task(interpreter.run())
    interpreter.feed([Fork(children=(1,)), Gen(op=1, name="x"), Gen(stream=1, op=2)], False)
    await asyncio.sleep(0.01)
    interpreter.cancel()
    await asyncio.wait_for(task, 1)
    assert events[-1].error.kind == "aborted"
    assert runs.executor.aborted == 2
    assert runs.executor.leaked == 0
    interpreter.cancel()
    interpreter.feed([Gen(op=3)], True)
    assert sum(isinstance(event, Done) for event in events) == 1


async def test_cancelling_before_it_runs(runs):
    interpreter, events = runs.start()
    interpreter.feed([Gen(op=1)], False)
    interpreter.cancel("not wanted")
    await interpreter.run()
    assert events == [Done(events[-1].error)]
    assert events[-1].error.message == "not wanted"


async def test_cancelling_the_task_of_run_cleans_up(runs):
    runs.executor.turns = lambda: 1_000_000_000
    interpreter, events = runs.start()
    task = asyncio.create_task(interpreter.run())
    interpreter.feed([Gen(op=1)], False)
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert events[-1].error.kind == "aborted"
    assert runs.executor.leaked == 0
