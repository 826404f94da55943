"""What programs do: text, values, references, roles, forks, joins, scopes."""

from __future__ import annotations

import asyncio

import pytest
from ramet.runtime.program.events import Synced, TextDelta, Value, Warned
from ramet.runtime.program.instructions import (
    Arg,
    Bind,
    End,
    Fork,
    Gen,
    Join,
    Ref,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    Sync,
    Text,
    Warm,
)


async def test_an_empty_program_is_done_at_once(runs):
    outcome = await runs.whole()
    assert outcome.done.error is None
    assert outcome.executor.leaked == 0


async def test_literals_arguments_and_references_make_the_text(runs, answered):
    outcome = await runs.whole(
        Text(parts=("Hello ", Arg("who"), ". ")),
        Gen(op=1, name="x"),
        Text(parts=(" again: ", Ref(0, "x"))),
        Sync(op=2, want="text"),
        args={"who": 7},
    )
    x = answered("Hello 7. ")
    assert outcome.value(1) == x
    assert outcome.synced(2).text == f"Hello 7. {x} again: {x}"
    assert outcome.streamed(0) == outcome.synced(2).text


async def test_generated_pieces_carry_their_op_and_literals_minus_one(runs, answered):
    outcome = await runs.whole(Text(parts=("a",)), Gen(op=5, name="x"), Text(parts=("b",)))
    deltas = [e for e in outcome.events if isinstance(e, TextDelta)]
    assert [d.op for d in deltas] == [-1, *[5] * len(answered("a")), -1]


async def test_without_streaming_there_are_no_deltas(runs):
    outcome = await runs.whole(Text(parts=("a",)), Gen(op=1, name="x"), stream=False)
    assert not [e for e in outcome.events if isinstance(e, TextDelta)]
    assert outcome.value(1)


async def test_n_samples_bind_a_list_and_go_on_with_the_first(runs, answered):
    outcome = await runs.whole(
        Gen(op=1, name="x", sampling={"n": 3}), Sync(op=2, want="text"), stream=True
    )
    assert outcome.value(1) == [answered("", i) for i in range(3)]
    assert outcome.synced(2).text == answered("", 0) == outcome.streamed(0)
    (value,) = [e for e in outcome.events if isinstance(e, Value)]
    assert isinstance(value.meta, list)
    assert len(value.meta) == 3


async def test_sampling_of_a_gen_goes_over_the_programs_defaults(runs):
    outcome = await runs.whole(
        Gen(op=1, name="x"), Gen(op=2, name="y", sampling={"n": 1}), sampling={"n": 2}
    )
    assert len(outcome.value(1)) == 2
    assert isinstance(outcome.value(2), str)


async def test_a_name_means_its_latest_earlier_binding(runs, answered):
    outcome = await runs.whole(
        Gen(op=1, name="x"),
        Text(parts=("<", Ref(0, "x"), ">")),
        Gen(op=2, name="x"),
        Text(parts=(Ref(0, "x"),)),
        Sync(op=3, want="text"),
    )
    first, second = outcome.value(1), outcome.value(2)
    assert outcome.synced(3).text == f"{first}<{first}>{second}{second}"


async def test_a_reference_waits_for_another_stream(runs):
    outcome = await runs.whole(
        Fork(children=(1,)),
        Text(stream=1, parts=("child",)),
        Gen(stream=1, op=1, name="x"),
        Text(parts=("root sees ", Ref(1, "x"))),
        Sync(op=2, want="text"),
    )
    assert outcome.synced(2).text == f"root sees {outcome.value(1)}"


async def test_select_appends_and_binds_a_choice_made_of_parts(runs):
    outcome = await runs.whole(
        Bind(name="b", parts=("two",)),
        Select(op=1, name="x", choices=(("one",), (Ref(0, "b"), "!"))),
        Sync(op=2, want="text"),
    )
    assert outcome.value(1) in ("one", "two!")
    assert outcome.synced(2).text == outcome.value(1)


async def test_bind_sets_without_adding_text(runs):
    outcome = await runs.whole(
        Bind(op=1, name="x", parts=("v",)), Text(parts=(Ref(0, "x"),)), Sync(op=2, want="text")
    )
    assert outcome.value(1) == "v"
    assert outcome.synced(2).text == "v"


async def test_roles_add_markers_and_collect_messages(runs, answered):
    outcome = await runs.whole(
        RoleBegin(role="user"),
        Text(parts=("hi",)),
        RoleEnd(role="user"),
        RoleBegin(role="assistant"),
        Gen(op=1, name="x"),
        RoleEnd(role="assistant"),
        RoleBegin(role="user"),
        Sync(op=2, want="messages"),
        Sync(op=3, want="text"),
    )
    x = outcome.value(1)
    assert outcome.synced(2).messages == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": x},
    ]
    assert outcome.synced(3).text == f"[user]hi[/user][assistant]{x}[/assistant][user]"
    assert outcome.streamed(0) == outcome.synced(3).text
    assert [e.message for e in outcome.events if isinstance(e, Warned)] == ["user", "assistant"]


async def test_children_have_the_parents_text_variables_messages_and_open_role(runs):
    outcome = await runs.whole(
        Gen(op=1, name="x"),
        RoleBegin(role="user"),
        Text(parts=("p",)),
        Fork(children=(1,)),
        Text(parts=("!",)),
        RoleEnd(role="user"),
        Text(stream=1, parts=("?", Ref(1, "x"))),
        RoleEnd(stream=1, role="user"),
        Sync(stream=1, op=2, want="messages"),
        Sync(stream=1, op=3, want="text"),
        Sync(op=4, want="messages"),
    )
    x = outcome.value(1)
    assert outcome.synced(2).messages == [{"role": "user", "content": f"p?{x}"}]
    assert outcome.synced(3).text == f"{x}[user]p?{x}[/user]"
    assert outcome.synced(4).messages == [{"role": "user", "content": "p!"}]
    assert outcome.streamed(1) == f"?{x}[/user]"


async def test_branches_run_at_the_same_time(runs):
    runs.executor.turns = lambda: 5
    await runs.whole(Fork(children=(1, 2, 3)), *(Gen(stream=i, op=i, name="x") for i in (1, 2, 3)))
    assert runs.executor.peak == 3


async def test_join_gathers_what_is_new_with_none_where_it_is_missing(runs):
    outcome = await runs.whole(
        Bind(name="old", parts=("o",)),
        Fork(children=(1, 2)),
        Gen(stream=1, op=1, name="x"),
        Gen(stream=2, op=2, name="x"),
        Gen(stream=2, op=3, name="y"),
        Bind(stream=2, name="old", parts=("changed",)),
        Join(op=4, children=(1, 2)),
        Sync(op=5, want="text"),
        Text(parts=(Ref(0, "old"),)),
        Sync(op=6, want="text"),
    )
    assert outcome.value(4, "x") == [outcome.value(1), outcome.value(2)]
    assert outcome.value(4, "y") == [None, outcome.value(3)]
    assert {e.name for e in outcome.events if isinstance(e, Value) and e.op == 4} == {"x", "y"}
    assert outcome.synced(5).text == ""
    assert outcome.synced(6).text == "o"


async def test_a_second_join_of_the_same_name_replaces_the_list(runs):
    outcome = await runs.whole(
        Fork(children=(1,)),
        Gen(stream=1, op=1, name="x"),
        Join(op=2, children=(1,)),
        Text(parts=("more",)),
        Fork(children=(2,)),
        Gen(stream=2, op=3, name="x"),
        Join(op=4, children=(2,)),
    )
    assert outcome.value(2) == [outcome.value(1)]
    assert outcome.value(4) == [outcome.value(3)]


async def test_lists_of_children_nest(runs):
    outcome = await runs.whole(
        Fork(children=(1,)),
        Fork(stream=1, children=(2, 3)),
        Gen(stream=2, op=1, name="x"),
        Gen(stream=3, op=2, name="x", sampling={"n": 2}),
        Join(stream=1, op=3, children=(2, 3)),
        Join(op=4, children=(1,)),
    )
    assert outcome.value(4) == [[outcome.value(1), outcome.value(2)]]


async def test_concate_and_append_adds_the_childrens_new_text_in_order(runs):
    outcome = await runs.whole(
        Text(parts=("p",)),
        Fork(children=(1, 2)),
        Gen(stream=1, op=1, name="x"),
        Text(stream=2, parts=("two",)),
        Join(op=2, children=(2, 1), mode="concate_and_append"),
        Sync(op=3, want="text"),
    )
    assert outcome.synced(3).text == f"ptwo{outcome.value(1)}" == outcome.streamed(0)


async def test_a_scope_is_the_text_between(runs):
    outcome = await runs.whole(
        Text(parts=("before ",)),
        ScopeBegin(name="outer"),
        Text(parts=("a",)),
        ScopeBegin(name="inner"),
        Gen(op=1, name="x"),
        ScopeEnd(op=2, name="inner"),
        Text(parts=("b",)),
        ScopeEnd(op=3, name="outer"),
        Text(parts=(Ref(0, "inner"),)),
    )
    x = outcome.value(1)
    assert outcome.value(2) == x
    assert outcome.value(3) == f"a{x}b"


async def test_sync_of_nothing_and_warm_report_that_they_were_reached(runs):
    outcome = await runs.whole(Sync(op=1), Warm(op=2), Warm())
    assert outcome.synced(1) == Synced(1)
    assert outcome.synced(2) == Synced(2)
    assert outcome.done.error is None


async def test_end_gives_the_context_back_while_the_program_goes_on(runs):
    interpreter, events = runs.start()
    task = asyncio.create_task(interpreter.run())
    interpreter.feed([Fork(children=(1,)), Text(stream=1, parts=("c",)), End(stream=1)], False)
    await asyncio.sleep(0.01)
    root, child = runs.executor.contexts
    assert (root.closed, child.closed) == (0, 1)
    interpreter.feed([Sync(op=1, want="text")], True)
    await task
    assert runs.executor.leaked == 0
    assert events[-2] == Synced(1, "")


async def test_values_come_while_the_program_is_still_open(runs):
    interpreter, events = runs.start()
    task = asyncio.create_task(interpreter.run())
    interpreter.feed([Gen(op=1, name="x")], False)
    await asyncio.sleep(0.01)
    assert any(isinstance(event, Value) for event in events)
    assert not task.done()
    interpreter.feed([], True)
    await asyncio.wait_for(task, 1)


@pytest.mark.parametrize("count", [0, 500])
async def test_many_children(runs, count):
    children = tuple(range(1, count + 1))
    outcome = await runs.whole(
        Text(parts=("p",)),
        Fork(children=children),
        *(Gen(stream=i, op=i, name="x") for i in children),
        Join(op=10_000, children=children),
        stream=False,
    )
    if count:
        assert len(set(outcome.value(10_000))) == 1
    assert outcome.executor.leaked == 0
