"""The service: handshakes, programs, bad messages, clients that vanish or do not read."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest
from ramet.runtime.gateway.service import ServiceLimits
from ramet.runtime.program.events import Done, Event, Failed, Synced, TextDelta, Value
from ramet.runtime.program.instructions import (
    Arg,
    Fork,
    Gen,
    Join,
    Program,
    Ref,
    Select,
    Sync,
    Text,
)
from ramet.runtime.program.limits import Limits
from ramet.runtime.protocol.messages import (
    CancelProgram,
    Control,
    ControlReply,
    OpenProgram,
    ProgramEvents,
    Refused,
    RegisterProgram,
    Welcome,
)

GEN = Gen(op=1, name="x", sampling={"max_new_tokens": 6, "ignore_eos": True, "seed": 1})
ENDLESS = Gen(op=1, name="x", sampling={"max_new_tokens": 400, "ignore_eos": True, "seed": 1})


async def connect(world, **options):
    client = world.client(**options)
    welcome = await client.greet()
    assert isinstance(welcome, Welcome), welcome
    return client


def value(events, op):
    (found,) = [e for e in events if isinstance(e, Value) and e.op == op]
    return found.value


async def test_the_welcome_says_what_is_served(world):
    await world.serve()
    welcome = await world.client().greet()
    assert (welcome.model, welcome.context_length, welcome.version) == ("fake", 512, 1)


async def test_a_wrong_version_is_refused_naming_both(world):
    await world.serve()
    client = world.client(version=99)
    refused = await client.greet()
    assert isinstance(refused, Refused)
    assert "99" in refused.error.message
    assert "version 1" in refused.error.message
    client.open([GEN])
    assert isinstance(await client.next(), Refused)


async def test_what_comes_before_hello_is_refused(world):
    await world.serve()
    client = world.client()
    client.open([GEN])
    refused = await client.next()
    assert "hello" in refused.error.message
    assert isinstance(await client.greet(), Welcome)


@pytest.mark.parametrize(("key", "welcome"), [("secret", True), ("wrong", False), (None, False)])
async def test_the_api_key_is_checked(world, key, welcome):
    await world.serve(api_key="secret")
    reply = await world.client(api_key=key).greet()
    assert isinstance(reply, Welcome if welcome else Refused)
    if not welcome:
        assert "API key" in reply.error.message


async def test_a_program_runs_and_its_events_come_in_order(world):
    await world.serve()
    client = await connect(world)
    client.open(
        [Text(parts=("ab", Arg("n"))), GEN, Text(parts=(Ref(0, "x"),)), Sync(op=2, want="text")],
        args={"n": 5},
        stream=True,
    )
    events = await client.events()
    x = value(events, 1)
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == f"ab5{x}{x}"
    (synced,) = [e for e in events if isinstance(e, Synced)]
    assert synced.text == f"ab5{x}{x}"
    assert events[-1] == Done()


async def test_neighbouring_deltas_come_as_one(world):
    await world.serve()
    client = await connect(world)
    client.open([Text(parts=(letter,)) for letter in "abcdef"], stream=True)
    events = await client.events()
    assert [e.text for e in events if isinstance(e, TextDelta)] == ["abcdef"]


async def test_a_fast_stream_is_few_messages(world):
    await world.serve()
    client = await connect(world)
    client.open([Gen(op=1, sampling={"max_new_tokens": 300, "ignore_eos": True})], stream=True)
    messages = 0
    events: list[Event] = []
    while not (events and isinstance(events[-1], Done)):
        message = await client.next()
        events += msgspec.msgpack.decode(message.events, type=list[Event])
        messages += 1
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    assert value(events, 1) == text
    assert messages < 200


async def test_a_program_may_come_in_pieces(world):
    await world.serve()
    client = await connect(world)
    client.open([Text(parts=("ab",))], closed=False)
    client.append([GEN])
    message = await client.next()
    assert isinstance(message, ProgramEvents)
    client.append([Sync(op=2, want="text")], closed=True)
    events = await client.events()
    assert any(isinstance(event, Synced) for event in events)
    client.append([GEN], closed=True)  # too late, and harmless
    client.send(CancelProgram(pid=1))
    client.open([GEN], pid=1)
    assert value(await client.events(), 1)


async def test_many_programs_at_a_time(world):
    await world.serve()
    client = await connect(world)
    for pid in range(50):
        client.open([Text(parts=(f"p{pid}",)), GEN], pid=pid)
    done = {}
    while len(done) < 50:
        message = await client.next()
        events = msgspec.msgpack.decode(message.events, type=list[Value | Done])
        for event in events:
            if isinstance(event, Value):
                done[message.pid] = event.value
    assert all(done.values())


async def test_a_registered_program_runs_with_each_set_of_arguments(world):
    service = await world.serve()
    client = await connect(world)
    program = Program(instructions=(Text(parts=(Arg("a"),)), Sync(op=1, want="text")), args=("a",))
    client.send(RegisterProgram(key=7, program=msgspec.Raw(msgspec.msgpack.encode(program))))
    for pid, text in ((1, "one"), (2, "two")):
        client.send(OpenProgram(pid=pid, key=7, args={"a": text}, closed=True))
        events = await client.events(pid)
        assert events[0] == Synced(1, text)
    client.send(OpenProgram(pid=3, key=8, closed=True))
    (done,) = await client.events(3)
    assert "registered under 8" in done.error.message
    assert service.programs == 0


async def test_cancel_aborts_in_the_engine_and_is_answered_by_done(world):
    await world.serve()
    world.engine.idle = True
    client = await connect(world)
    client.open([ENDLESS])
    await world.settle(lambda: bool(world.engine.running))
    client.send(CancelProgram(pid=1))
    events = await client.events()
    assert events[-1].error.kind == "aborted"
    await world.settle(lambda: not world.engine.running)


@pytest.mark.parametrize(
    "frames",
    [
        [b"\xc1"],
        [b""],
        [b"not msgpack at all"],
        [msgspec.msgpack.encode({"type": "nonsense"})],
        [msgspec.msgpack.encode({"type": "open", "pid": "one"})],
        [b"\x91" * 100_000],
        [b"a", b"b"],
    ],
)
async def test_a_malformed_message_is_refused_and_the_service_goes_on(world, frames, caplog):
    await world.serve()
    client = await connect(world)
    client.send_raw(*frames)
    for _ in frames:  # each frame is a message
        assert isinstance(await client.next(), Refused)
    assert "refused a message" in caplog.text
    client.open([GEN])
    assert value(await client.events(), 1)


async def test_too_many_messages_at_once_are_refused_in_one(world):
    await world.serve()
    client = await connect(world)
    client.send_raw(*[b"x"] * 300)
    refused = await client.next()
    assert isinstance(refused, Refused)
    assert "travel together" in refused.error.message
    client.open([GEN])
    assert value(await client.events(), 1)


async def test_a_malformed_program_ends_with_an_error_of_its_own(world):
    await world.serve()
    client = await connect(world)
    nonsense = msgspec.msgpack.encode({"instructions": [{"type": "dance"}]})
    client.send(OpenProgram(pid=4, program=msgspec.Raw(nonsense), closed=True))
    (done,) = await client.events(4)
    assert "malformed program" in done.error.message
    client.open([Gen(op=1), Gen(op=1)], pid=5)
    assert "used twice" in (await client.events(5))[-1].error.message


async def test_a_message_over_the_limit_is_refused(world):
    await world.serve(limits=ServiceLimits(message_bytes=10_000))
    client = await connect(world)
    client.send_raw(b"\x00" * 15_000)
    refused = await client.next()
    assert "15000" in refused.error.message
    client.open([GEN])
    assert value(await client.events(), 1)


async def test_a_message_far_over_the_limit_only_costs_its_sender(world):
    await world.serve(limits=ServiceLimits(message_bytes=10_000))
    other = await connect(world)
    client = await connect(world)
    client.send_raw(b"\x00" * 1_000_000)
    other.open([GEN])
    assert value(await other.events(), 1)


async def test_limits_on_programs(world):
    world.engine.idle = True
    await world.serve(limits=ServiceLimits(programs=2, program=Limits(streams=2)))
    client = await connect(world)
    client.open([Fork(children=(1, 2, 3))], pid=9)
    assert "streams" in (await client.events(9))[-1].error.message
    client.open([ENDLESS], pid=1)
    client.open([ENDLESS], pid=2)
    client.open([ENDLESS], pid=3)
    (done,) = await client.events(3)
    assert "more than 2 programs" in done.error.message


async def test_two_programs_under_one_number_are_refused(world):
    world.engine.idle = True
    await world.serve()
    client = await connect(world)
    client.open([ENDLESS])
    client.open([ENDLESS])
    refused = await client.next()
    assert "open already" in refused.error.message


async def test_a_client_that_vanishes_loses_its_work(world, caplog):
    caplog.set_level(logging.INFO)
    service = await world.serve()
    world.engine.idle = True
    client = await connect(world)
    other = await connect(world)
    client.open([Fork(children=(1,)), ENDLESS, Gen(stream=1, op=2)])
    other.open([GEN])
    await world.settle(lambda: len(world.engine.running) == 3)
    client.close()
    await world.settle(lambda: len(world.engine.running) == 1, 8)
    assert service.clients == 1
    assert "client test left: " in caplog.text
    world.engine.idle = False
    assert value(await other.events(), 1)
    await world.settle(lambda: not world.engine.handles)


async def test_a_client_that_does_not_read_is_cut_off(world):
    service = await world.serve(limits=ServiceLimits(buffered_bytes=100_000))
    other = await connect(world)
    client = await connect(world)
    client.stop_reading()
    deadline = asyncio.get_running_loop().time() + 20
    pid = 0
    # Answers that are made together travel together, and a socket holds some: until it is full.
    while service.clients > 1:
        assert asyncio.get_running_loop().time() < deadline, "it was never cut off"
        for _ in range(20):
            client.open([Text(parts=("x" * 50_000,)), Sync(op=1, want="text")], pid=pid)
            pid += 1
        await asyncio.sleep(0.01)
    assert service.programs == 0
    other.open([GEN])
    assert value(await other.events(), 1)


async def test_a_slow_reader_gets_all_of_it(world):
    await world.serve()
    client = await connect(world)
    reader = client.wire._read
    client.stop_reading()
    texts = [f"{i} " + "x" * 20_000 for i in range(400)]
    client.open([Text(parts=(text,)) for text in texts[:200]], stream=True, closed=False)
    for text in texts[200:]:
        client.append([Text(parts=(text,))])
        await asyncio.sleep(0.001)
    client.append([], closed=True)
    await asyncio.sleep(0.1)
    client.wire._read = client.wire._look = reader
    asyncio.get_running_loop().add_reader(client.wire._descriptor, reader)
    reader()
    events = await client.events()
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == "".join(texts)


async def test_errors_of_one_program_do_not_touch_another(world):
    await world.serve()
    client = await connect(world)
    client.open([Select(op=1, choices=(), line="a.py:3")], pid=1)
    events = await client.events(1)
    (failed,) = [e for e in events if isinstance(e, Failed)]
    assert failed.error.where == "a.py:3"
    client.open([GEN], pid=2)
    assert value(await client.events(2), 1)


async def test_an_engine_that_dies_fails_programs_in_time(world):
    await world.serve()
    world.engine.idle = True
    client = await connect(world)
    client.open([ENDLESS])
    await world.settle(lambda: bool(world.engine.running))
    world.engine.die()
    events = await asyncio.wait_for(client.events(), 5)
    (failed,) = [e for e in events if isinstance(e, Failed)]
    assert failed.error.kind == "backend"
    assert "engine is gone" in failed.error.message


async def test_server_info_and_flush(world):
    await world.serve()
    world.engine.refuse_flush = 2
    client = await connect(world)
    client.send(Control(id=5, op="server_info"))
    info = await client.next()
    assert info.id == 5
    assert info.data["model"] == "fake"
    assert info.data["context_length"] == 512
    assert info.data["pages"] == {"total": 1}
    client.send(Control(id=6, op="flush_cache"))
    reply = await client.next()
    assert isinstance(reply, ControlReply)
    assert reply.error is None


@pytest.mark.parametrize("api_key", ["secret", None])
async def test_where_there_is_an_admin_key_nobody_else_may_flush(world, api_key):
    await world.serve(api_key=api_key, admin_key="admin")
    for key, error in ((api_key, "takes the admin key"), ("admin", None)):
        client = await connect(world, api_key=key)
        client.send(Control(id=1, op="flush_cache"))
        reply = await client.next()
        assert (reply.error is None) == (error is None), reply
        assert error is None or error in reply.error.message


async def test_closing_tells_running_programs(world):
    service = await world.serve()
    world.engine.idle = True
    client = await connect(world)
    client.open([ENDLESS])
    await world.settle(lambda: bool(world.engine.running))
    await service.close(0.05)
    events = await client.events()
    assert "shutting down" in events[-1].error.message


async def test_a_storm_leaves_nothing_and_spares_the_rest(world):
    """64 programs over four clients; a third is cancelled or its client vanishes in mid-flight."""
    await world.serve()
    program = [
        Text(parts=("start ", Arg("n"))),
        Gen(op=1, name="x", sampling={"max_new_tokens": 20, "ignore_eos": True}),
        Fork(children=(1, 2)),
        Gen(stream=1, op=2, name="y", sampling={"max_new_tokens": 20, "n": 2}),
        Select(stream=2, op=3, name="y", choices=(("ab",), ("cd",), ("x",))),
        Join(op=4, children=(1, 2)),
        Sync(op=5, want="text"),
    ]
    options = {"sampling": {"temperature": 0.0, "seed": 2}, "stream": True}
    expected: dict[int, object] = {}
    quiet = await connect(world)
    for number in range(16):
        quiet.open(program, pid=number, args={"n": number}, **options)
        expected[number] = await quiet.events(number)
    clients = [await connect(world) for _ in range(4)]
    for client in clients:
        for number in range(16):
            client.open(program, pid=number, args={"n": number}, **options)
    await asyncio.sleep(0.02)
    clients[3].close()
    for number in range(0, 16, 3):
        clients[0].send(CancelProgram(pid=number))
    seen: dict[tuple[int, int], list[object]] = {}
    for index, client in enumerate(clients[:3]):
        ended = 0
        while ended < 16:
            message = await client.next()
            events = msgspec.msgpack.decode(message.events, type=list[Event])
            seen.setdefault((index, message.pid), []).extend(events)
            ended += isinstance(events[-1], Done)
    await world.settle(lambda: not world.engine.running and not world.engine.handles)
    assert world.client_of_engine.in_flight == 0
    assert world.services[0].programs == 0
    whole = 0
    for (_, number), events in seen.items():
        if events[-1].error is None:
            whole += 1
            values = {(e.op, e.name): e.value for e in events if isinstance(e, Value)}
            assert values == {
                (e.op, e.name): e.value for e in expected[number] if isinstance(e, Value)
            }
    assert whole >= 32
