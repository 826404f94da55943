"""What the engine is told of the rest of a program with each of its requests."""

from __future__ import annotations

import asyncio

import pytest
from ramet.runtime.program.instructions import Bind, Fork, Gen, Join, Part, Ref, Select, Sync, Text
from ramet.runtime.program.interpreter import Interpreter
from ramet.runtime.program.limits import Limits

SHORT = {"max_new_tokens": 3, "seed": 1, "temperature": 0.0}


def gen(stream=0, op=1, name="x"):
    return Gen(stream=stream, op=op, name=name, sampling=SHORT)


def text(*parts: Part, stream=0):
    return Text(stream=stream, parts=parts)


def start(world, instructions, closed=True):
    interpreter = Interpreter(
        world.executor, lambda events: None, program=7, sampling={}, args={}, stream=False,
        limits=Limits(),
    )  # fmt: skip
    task = asyncio.create_task(interpreter.run())
    interpreter.feed(instructions, closed)
    return interpreter, task


async def run(world, instructions):
    await world.client_of_engine.start(5)
    _, task = start(world, instructions)
    await asyncio.wait_for(task, 10)
    await world.settle(lambda: not world.engine.handles)
    return world.engine.submits


def tree(last=True):
    """A text that three streams begin with; the parent goes on from it too."""
    children = [text("c", stream=i) for i in (1, 2, 3)]
    gens = [gen(i, i, f"v{i}") for i in (1, 2, 3)]
    whole = [text("one long stem "), Fork(children=(1, 2, 3)), *children, *gens]
    return [*whole, Join(children=(1, 2, 3)), *([text("end"), gen(0, 9)] if last else [])]


async def test_a_fork_marks_its_text_once_and_counts_what_is_to_come(world):
    first, *others, last = await run(world, tree())
    stem = world.tokenizer.encode("one long stem ")
    assert [length for _, length in first.marks] == [len(stem)] * 3, "one for each other stream"
    assert [submit.remaining for submit in (first, *others, last)] == [3, 2, 1, 0]
    assert all(not submit.marks for submit in (*others, last))
    assert all(submit.program == 7 for submit in (first, *others, last))
    assert all(submit.keep is None for submit in (first, *others, last)), "no stream goes on"


async def test_the_mark_is_there_until_the_last_has_read_it(world):
    """The second child waits for the first one's value, its parent for neither."""
    longer = {**SHORT, "max_new_tokens": 200, "ignore_eos": True}
    program = [
        text("stem"),
        Fork(children=(1, 2)),
        gen(1, 1, "a"),
        text("then ", Ref(1, "a"), stream=2),
        Gen(stream=2, op=2, name="b", sampling=longer),
    ]
    world.engine.idle = True
    await world.client_of_engine.start(5)
    _, task = start(world, program)
    await world.settle(lambda: len(world.engine.running) == 1)
    ((handle, length),) = world.engine.submits[0].marks
    assert length == 4
    world.engine.idle = False
    await world.settle(lambda: len(world.engine.submits) == 2)
    assert handle in world.engine.handles
    await asyncio.wait_for(task, 10)
    await world.settle(lambda: not world.engine.handles)


async def test_an_only_reader_marks_nothing(world):
    submits = await run(world, [text("stem"), Fork(children=(1,)), gen(1), Join(children=(1,))])
    assert [submit.marks for submit in submits] == [()]
    submits = await run(world, [text("stem"), Fork(children=(1,)), gen(1), gen(0, 2)])
    assert sum(len(submit.marks) for submit in submits) == 1


async def test_a_stream_is_kept_while_it_goes_on(world):
    program = [text("a"), gen(op=1), Sync(op=3), text("b"), gen(op=2)]
    first, second = await run(world, program)
    assert first.keep is not None
    assert second.keep is None
    assert (first.remaining, second.remaining) == (1, 0)


async def test_of_a_program_that_is_open_more_may_come(world):
    await world.client_of_engine.start(5)
    interpreter, task = start(world, [text("a"), gen()], closed=False)
    await world.settle(lambda: len(world.engine.finished) == 1)
    assert world.engine.submits[0].keep is not None
    assert world.engine.submits[0].remaining == 0
    interpreter.feed([gen(op=2)], True)
    await asyncio.wait_for(task, 10)
    await world.settle(lambda: not world.engine.handles)
    assert world.engine.submits[1].base == world.engine.submits[0].keep
    assert world.engine.submits[1].keep is None


async def test_choices_share_what_they_begin_with_and_the_stream_goes_on_from_it(world):
    select = Select(op=1, name="s", choices=(("x",), ("yz",), ("q",)))
    scored, last = await run(world, [text("prompt"), select, gen(op=2)])
    prompt = len(world.tokenizer.encode("prompt"))
    assert scored.trie is not None
    assert (last.base, last.base_len) == (scored.keep, prompt)
    assert [submit.remaining for submit in (scored, last)] == [1, 0]
    *_, alone = await run(world, [text("prompt"), select])
    assert alone.keep is None, "nobody goes on from it"


async def test_what_never_runs_is_not_to_come(world):
    program = [
        text("stem"),
        Fork(children=(1,)),
        Bind(stream=1, op=5, name="list", parts=(Ref(1, "nobody"),)),
        gen(1, 1, "a"),
        gen(1, 2, "b"),
        gen(0, 3, "c"),
        Sync(op=6),
        gen(0, 4, "d"),
    ]
    submits = await run(world, program)
    assert len(submits) == 2, "the child failed before it generated"
    assert submits[-1].remaining == 0


@pytest.mark.parametrize("depth", [3, 40])
async def test_nested_forks_mark_each_level_and_never_many(world, depth):
    program = [text("root ")]
    for level in range(depth):
        program += [Fork(stream=level, children=(level + 1,)), text(f"{level} ", stream=level + 1)]
    program.append(gen(depth, depth, "deepest"))
    for level in range(depth):
        program += [text(Ref(depth, "deepest"), stream=level), gen(level, level)]
    first, *others = await run(world, program)
    assert len(others) == depth
    assert len({length for _, length in first.marks}) == min(depth, 8)
    assert len(first.marks) <= 4 * 8
