"""Generations that follow each other in a stream: sent together, gone on with where the first ends,
and the same as if they had been sent one by one."""

from __future__ import annotations

import asyncio

import pytest
from ramet.runtime.program.events import Failed, Value
from ramet.runtime.program.instructions import Gen, Ref, RoleBegin, RoleEnd, Sync, Text
from ramet.runtime.program.interpreter import Interpreter
from ramet.runtime.program.limits import Limits

SHORT = {"max_new_tokens": 5, "seed": 1, "temperature": 0.0}


def gen(op, **sampling):
    return Gen(stream=0, op=op, name=f"v{op}", sampling={**SHORT, **sampling})


def text(*parts):
    return Text(stream=0, parts=parts)


def begin(world, program, events, stream=False):
    interpreter = Interpreter(
        world.executor, events.extend, program=7, sampling={}, args={}, stream=stream,
        limits=Limits(),
    )  # fmt: skip
    task = asyncio.create_task(interpreter.run())
    interpreter.feed(program, True)
    return interpreter, task


async def run(world, *program, stream=False):
    """Values by name, and the events."""
    await world.client_of_engine.start(5)
    events = []
    _, task = begin(world, program, events, stream)
    await asyncio.wait_for(task, 10)
    await world.settle(lambda: not world.engine.handles)
    assert not world.client_of_engine.in_flight
    return {e.name: e for e in events if isinstance(e, Value)}, events


def apart(program):
    """The same with something between that the engine knows nothing of."""
    return [part for one in program for part in (one, Sync(op=90 + len(repr(one)) * 100 + one.op))
            if isinstance(one, Gen) or part is one]  # fmt: skip


LINES = {
    "two": [text("one "), gen(1), text("two "), gen(2)],
    "four": [text("x"), gen(1), gen(2), text("a", "b"), text("c"), gen(3), text("d"), gen(4)],
    "stop": [text("x"), gen(1, stop=["c"], max_new_tokens=40), text(" then "), gen(2)],
    "stops": [text("x")] + [gen(i, stop=["a", "f"], max_new_tokens=40) for i in range(1, 7)],
    "value": [text("x"), gen(1), text("saw "), gen(2), text(" and ", Ref(0, "v1")), gen(3)],
    "known value": [gen(1), Sync(op=80), text("x"), gen(2), text(Ref(0, "v1")), gen(3)],
    "role": [text("x"), RoleBegin(role="user"), gen(1), text("<|im_end|>"), gen(2),
             RoleEnd(role="user")],
    "logprobs": [text("x"), gen(1), text("y"), gen(2, return_logprob=True, top_logprobs_num=2)],
    "healed": [text("x"), gen(1), text("ab"), gen(2, heal=True), text("b"), gen(3)],
    "samples": [text("x"), gen(1), text("b"), gen(2, n=3), text("b"), gen(3)],
    "long": [text("x"), gen(1), text("b"), gen(2, max_new_tokens=None), text("c")],
}  # fmt: skip


ALONE = ("long", "healed", "samples")
"""Of which nothing can be sent ahead."""


def plain(values):
    """Values and what was said of them, but for numbers of requests and times."""

    def of(meta):
        known = meta.as_dict()
        return {k: v for k, v in known.items() if k not in ("id", "e2e_latency", "ttft")}

    found = {}
    for name, event in values.items():
        metas = event.meta if isinstance(event.meta, list) else [event.meta]
        found[name] = event.value, [of(meta) for meta in metas]
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("forgetful", [False, True])
@pytest.mark.parametrize("line", list(LINES))
async def test_as_if_one_by_one(new_world, line, forgetful, stream):
    """Also where the engine never goes on by itself."""
    results, prompts, sent = [], [], []
    for program in (apart(LINES[line]), LINES[line]):
        async with new_world() as world:
            world.engine.forgetful = forgetful
            values, events = await run(world, *program, stream=stream)
            results.append(plain(values))
            prompts.append(sorted(world.engine.prompts))
            sent.append(sum(submit.then is not None for submit in world.engine.submits))
            assert not [event for event in events if isinstance(event, Failed)]
    assert results[0] == results[1]
    assert prompts[0] == prompts[1]
    assert sent[0] == 0
    assert sent[1] > 0 or line in ALONE


async def test_each_is_sent_once(world):
    values, _ = await run(world, *LINES["four"])
    assert len(values) == len(world.engine.submits) == 4
    first = world.engine.submits[0]
    assert first.then.then.then.then is None
    assert first.keep is None
    assert world.engine.submits[3].base is None


async def test_times_are_of_the_request_itself(world):
    values, _ = await run(world, *LINES["two"])
    second = values["v2"].meta
    assert 0 <= second.ttft <= second.e2e_latency < 5


async def test_what_is_cancelled_goes_no_further(world):
    await world.client_of_engine.start(5)
    world.engine.idle = True
    events = []
    interpreter, task = begin(world, LINES["four"], events)
    await world.settle(lambda: len(world.engine.submits) == 1)
    interpreter.cancel()
    await asyncio.wait_for(task, 10)
    await world.settle(lambda: len(world.engine.aborted) == 4)
    assert not world.client_of_engine.in_flight


async def test_a_failure_ends_the_line(world):
    await world.client_of_engine.start(5)
    world.engine.idle = True
    events = []
    _, task = begin(world, LINES["four"], events)
    await world.settle(lambda: len(world.engine.submits) == 1)
    world.engine.die()
    await asyncio.wait_for(task, 10)
    assert [type(event) for event in events].count(Failed) == 1
    assert not world.client_of_engine.in_flight


async def test_text_that_was_stripped_is_not_what_was_announced(new_world, new_tokenizer):
    """A template that strips messages: nothing was generated, so the blanks behind it go."""
    tokenizer = new_tokenizer(
        "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[end]{% endfor %}"
    )
    opened, closed = RoleBegin(role="user"), RoleEnd(role="user")
    program = [opened, gen(1, stop=["a"]), text("  x"), gen(2), closed]
    prompts = []
    for variant in (apart(program), program):
        async with new_world(tokenizer) as world:
            world.engine.says("a")
            await run(world, *variant)
            prompts.append(world.engine.prompts[-1])
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize("began", [False, True])
async def test_a_line_goes_on_in_another_engine(world, began):
    """The first that nobody was told of is submitted again; what was to follow it is sent anew."""
    await world.client_of_engine.start(5)
    world.client_of_engine._resubmit = True
    old = world.engine
    old.next_token = lambda tokens: 98
    old.idle = not began
    events = []
    program = [text("x"), gen(1), text("y"), gen(2, max_new_tokens=200), text("z"), gen(3)]
    _, task = begin(world, program, events)
    if began:
        await world.settle(lambda: any(isinstance(event, Value) for event in events))
    else:
        await world.settle(lambda: len(old.submits) == 1)
    old.die()
    world.engine = type(old)(world.engine_address, old.tokenizer)
    world.engine.next_token = lambda tokens: 97
    await asyncio.wait_for(task, 15)
    values = {event.name: event.value for event in events if isinstance(event, Value)}
    assert values == {"v1": ("b" if began else "a") * 5, "v2": "a" * 200, "v3": "a" * 5}
    await world.settle(lambda: not world.engine.handles)
    assert not world.client_of_engine.in_flight
