"""Programs as JSON over HTTP: whole, in pieces, under a lease."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from typing import Any

import msgspec
import pytest
from ramet.runtime.gateway.http import held_program
from ramet.runtime.gateway.http.state import HttpLimits
from ramet.runtime.program.events import Event
from ramet.runtime.program.instructions import (
    Arg,
    Fork,
    Gen,
    Instruction,
    Join,
    Program,
    Ref,
    RoleBegin,
    RoleEnd,
    Select,
    Sync,
    Text,
)  # fmt: skip

PATH = "/v1/programs"
GREEDY = {"temperature": 0, "max_new_tokens": 6}


def data(instructions: list[Instruction], **fields: Any) -> dict[str, Any]:
    """A program as a client writes it."""
    return msgspec.to_builtins(Program(instructions=tuple(instructions), **fields))


TIPS = data(
    [
        RoleBegin(role="user"),
        Text(parts=("Say ", Arg("what"), ".")),
        RoleEnd(role="user"),
        RoleBegin(role="assistant"),
        Fork(children=(1, 2)),
        Gen(stream=1, op=0, name="tip"),
        Gen(stream=2, op=1, name="tip", sampling={"temperature": 1, "seed": 7}),
        Text(stream=2, parts=(" after ", Ref(1, "tip"))),
        Join(op=2, children=(1, 2)),
        Select(op=3, name="best", choices=(("ab",), ("cd",))),
        Sync(op=4, want="text"),
    ],
    args=("what",),
    sampling=GREEDY,
)
TIPS_ARGS = {"what": "ab<eos>"}
ENDLESS = data([Text(parts=("ab",)), Gen(op=0, name="x", sampling={"max_new_tokens": 400})])


def decoded(line: str) -> Event:
    return msgspec.json.decode(line, type=Event)


def shape(events: list[Any]) -> list[Any]:
    """Events by op, without what is never twice the same: ids, times, a float's last digits."""
    plain = json.loads(msgspec.json.encode(events), parse_float=lambda text: round(float(text), 4))
    for item in plain:
        for name in ("id", "e2e_latency", "ttft"):
            item.get("meta", {}).pop(name, None)
    return sorted(plain, key=lambda item: item.get("op", 10**6))


async def over_zmq(site, program: dict[str, Any], **fields: Any) -> list[Event]:
    client = site.world.client()
    await client.greet()
    instructions = msgspec.convert(program, Program).instructions
    client.open(list(instructions), sampling=program.get("sampling", {}), **fields)
    return await client.events()


async def next_data(lines: Any) -> str:
    async for line in lines:
        if line:
            assert line.startswith("data: ")
            return line.removeprefix("data: ")
    raise AssertionError("the stream ended")


async def drained(lines: Any) -> list[str]:
    return [line.removeprefix("data: ") async for line in lines if line]


async def test_a_whole_program_gives_what_it_gives_over_the_other_port(site):
    reply = await site.post(PATH, program=TIPS, args=TIPS_ARGS)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    want = await over_zmq(site, TIPS, args=TIPS_ARGS)
    assert shape(answer["events"]) == shape(want)
    assert answer["status"] == "completed"
    assert answer["error"] is None
    assert answer["values"].keys() == {"tip", "best"}
    assert answer["values"]["best"] in ("ab", "cd")
    assert len(answer["values"]["tip"]) == 2
    assert answer["events"][-1] == {"type": "done"}
    await site.idle()


LOOP = [
    {"type": "text", "parts": ["ab"]},
    {
        "type": "repeat", "op": 9, "times": 5, "count": "n",
        "body": [
            {"type": "gen", "op": 1, "name": "x"},
            {"type": "switch", "op": 2, "value": [{"type": "ref", "stream": 0, "name": "n"}],
             "cases": {"2": [{"type": "bind", "op": 3, "name": "stop", "parts": ["yes"]}]},
             "default": [{"type": "bind", "op": 4, "name": "stop", "parts": ["no"]}]},
        ],
        "until": {"value": [{"type": "ref", "stream": 0, "name": "stop"}], "texts": ["yes"]},
    },
    {"type": "sync", "op": 10, "want": "text"},
]  # fmt: skip


async def test_a_loop_and_a_switch_as_json(site):
    site.engine.says("h", "i")
    program = {"instructions": LOOP, "sampling": GREEDY}
    answer = (await site.post(PATH, program=program)).json()
    assert answer["status"] == "completed"
    assert answer["values"] == {"x": "hi", "n": "2", "stop": "yes"}
    entered = [event for event in answer["events"] if event["type"] == "entered"]
    assert entered == [
        {"type": "entered", "stream": 0, "op": 9, "turn": 1},
        {"type": "entered", "stream": 0, "op": 2},
        {"type": "entered", "stream": 0, "op": 9, "turn": 2},
        {"type": "entered", "stream": 0, "op": 2, "case": "2"},
    ]
    (text,) = [event["text"] for event in answer["events"] if event["type"] == "synced"]
    assert text == "abhihi"
    await site.idle()


async def test_loops_in_pieces(site):
    site.engine.says("h", "i")
    opened = (await site.post(PATH, closed=False, sampling=GREEDY)).json()
    path = f"{PATH}/{opened['id']}/append"
    for instruction in LOOP[:-1]:
        assert (await site.post(path, instructions=[instruction])).status_code == 200
    answer = (await site.post(path, instructions=LOOP[-1:], closed=True)).json()
    assert answer["values"] == {"x": "hi", "n": "2", "stop": "yes"}
    await site.idle()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"times": 0}, "times must be 1 to"),
        ({"times": "5"}, "Expected `int`"),
        ({"body": [{"type": "loop"}]}, "Invalid value 'loop'"),
        ({"body": [{"type": "text", "parts": ["a"], "stream": 4}]}, "stream 4 does not exist"),
        ({"body": [{"type": "role_begin", "role": "user"}]}, "role 'user' is open"),
        ({"until": {"value": ["a"], "texts": ["b"], "match": "regex"}}, "Invalid enum value"),
    ],
)
async def test_blocks_that_cannot_be(site, change, what):
    reply = await site.post(PATH, program={"instructions": [{**LOOP[1], **change}]})
    assert reply.status_code == 400
    assert what in reply.json()["error"]["message"]
    await site.idle()


async def test_a_body_nested_too_deep_is_a_bad_request(site):
    one = {"type": "text", "parts": ["a"]}
    for depth in (60, 300):
        for _ in range(depth):
            one = {"type": "repeat", "times": 1, "body": [one]}
        reply = await site.post(PATH, program={"instructions": [one]})
        assert reply.status_code == 400
        assert "nest" in reply.json()["error"]["message"]
    await site.idle()


async def test_a_stream_has_an_event_for_each_value_and_piece_of_text(site):
    site.engine.says("h", "i", "!")
    program = data([Text(parts=("ab",)), Gen(op=0, name="x", sampling=GREEDY)])
    lines = await site.lines(PATH, program=program)
    assert lines.pop() == "[DONE]"
    opened = json.loads(lines.pop(0))
    assert opened["type"] == "opened"
    assert opened["id"].startswith("prog-")
    kinds = [json.loads(line)["type"] for line in lines]
    assert kinds[0] == "delta"
    assert kinds[-2:] == ["value", "done"]
    deltas = [decoded(line) for line in lines if json.loads(line)["type"] == "delta"]
    assert "".join(delta.text for delta in deltas) == "abhi!"
    assert "".join(delta.text for delta in deltas if delta.op == 0) == "hi!"
    quiet = await site.lines(PATH, program=program, deltas=False)
    assert [json.loads(line)["type"] for line in quiet[1:-1]] == ["value", "done"]
    await site.idle()


@pytest.mark.parametrize("cuts", [(1,), (4, 5), (3, 7, 9), tuple(range(1, 11))])
async def test_pieces_make_the_same_program(site, cuts):
    whole = (await site.post(PATH, program=TIPS, args=TIPS_ARGS)).json()
    instructions = TIPS["instructions"]
    bounds = [0, *cuts, len(instructions)]
    first, *rest = [instructions[a:b] for a, b in itertools.pairwise(bounds)]
    body = {"program": {**TIPS, "instructions": first}, "args": TIPS_ARGS, "closed": False}
    opened = (await site.post(PATH, **body)).json()
    assert (opened["status"], opened["lease"]) == ("open", 15)
    path = f"{PATH}/{opened['id']}/append"
    for piece in rest[:-1]:
        reply = await site.post(path, instructions=piece)
        assert reply.json()["status"] == "open"
    answer = (await site.post(path, instructions=rest[-1], closed=True)).json()
    assert shape(answer["events"]) == shape(whole["events"])
    assert answer["values"] == whole["values"]
    assert (await site.http.get(f"{PATH}/{opened['id']}")).status_code == 404
    await site.idle()


async def test_pieces_while_their_events_are_read(site):
    site.engine.says("h", "i")
    body = {"closed": False, "stream": True, "deltas": False, "sampling": GREEDY}
    async with site.http.stream("POST", PATH, json=body) as reply:
        lines = reply.aiter_lines()
        name = json.loads(await next_data(lines))["id"]
        for op in range(3):
            piece = msgspec.to_builtins([Text(parts=("ab",)), Gen(op=op, name="x")])
            sent = await site.post(f"{PATH}/{name}/append", instructions=piece)
            assert sent.json() == {"id": name, "object": "program", "status": "open", "lease": 15}
            event = json.loads(await next_data(lines))
            assert (event["op"], event["value"]) == (op, "hi")
        await site.post(f"{PATH}/{name}/append", closed=True)
        assert await drained(lines) == ['{"type":"done"}', "[DONE]"]
    await site.idle()


async def test_a_reader_may_come_later_and_come_again(site):
    site.engine.next_token = lambda tokens: 97
    opened = (await site.post(PATH, closed=False, sampling={"max_new_tokens": 2})).json()
    path = f"{PATH}/{opened['id']}"
    seen: list[Any] = []
    for op in range(2):
        piece = msgspec.to_builtins([Gen(op=op, name="x")])
        await site.post(f"{path}/append", instructions=piece)
        async with site.http.stream("GET", f"{path}/events") as reply:
            lines = reply.aiter_lines()
            await next_data(lines)
            second = await site.http.get(f"{path}/events")
            assert second.status_code == 400
            seen.append(json.loads(await next_data(lines)))
        await site.world.settle(lambda: not site.state.find(opened["id"]).reading)
    assert [(event["op"], event["value"]) for event in seen] == [(0, "aa"), (1, "aa")]
    assert (await site.http.get(path)).json()["status"] == "open"
    assert (await site.http.delete(path)).json()["deleted"]
    await site.idle()


async def test_two_readers_at_once_are_one_reader(site):
    """However they come together, one reads and the others are told; the program goes on."""
    site.engine.idle = True
    site.engine.next_token = lambda tokens: 97
    for _ in range(5):
        name = (await site.post(PATH, program=ENDLESS, closed=False)).json()["id"]
        closing = [
            asyncio.create_task(site.post(f"{PATH}/{name}/append", closed=True)) for _ in range(6)
        ]
        await site.world.settle(lambda name=name: site.state.find(name).reading)
        site.engine.idle = False
        replies = [(await task) for task in closing]
        site.engine.idle = True
        assert {reply.status_code for reply in replies} == {200}
        results = [reply.json() for reply in replies if "values" in reply.json()]
        assert [result["values"]["x"] for result in results] == ["a" * 400]
    await site.idle()


async def test_a_lease_that_runs_out_ends_the_program(site):
    site.engine.next_token = lambda tokens: 97
    site.engine.idle = True
    body = {"program": ENDLESS, "closed": False, "lease": 0.2}
    name = (await site.post(PATH, **body)).json()["id"]
    await site.world.settle(lambda: bool(site.engine.running))
    for _ in range(4):  # an empty append keeps it
        await asyncio.sleep(0.1)
        assert (await site.post(f"{PATH}/{name}/append")).status_code == 200
    await site.idle()
    assert site.engine.aborted
    reply = await site.post(f"{PATH}/{name}/append")
    assert reply.status_code == 404


async def test_a_reader_learns_of_the_lease(site):
    lines = await site.lines(PATH, closed=False, lease=0.1)
    done = json.loads(lines[-2])
    assert done["type"] == "done"
    assert "lease of 0.1 s" in done["error"]["message"]
    assert lines[-1] == "[DONE]"
    await site.idle()


async def test_a_closed_program_that_is_read_needs_no_lease(site):
    site.engine.next_token = lambda tokens: 97
    site.engine.idle = True
    running = asyncio.create_task(site.post(PATH, program=ENDLESS, lease=0.05))
    await asyncio.sleep(0.4)
    site.engine.idle = False
    assert (await running).json()["values"]["x"] == "a" * 400


@pytest.mark.parametrize(("stream", "closed"), [(False, True), (True, False), (True, True)])
async def test_a_client_that_goes_away_aborts(site, stream, closed):
    site.engine.next_token = lambda tokens: 97
    site.engine.idle = True
    body = {"program": ENDLESS, "stream": stream, "closed": closed}
    running = asyncio.create_task(site.post(PATH, **body))
    await site.world.settle(lambda: bool(site.engine.running))
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    await site.idle()
    assert len(site.engine.aborted) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_delete_and_abort(site, stream):
    site.engine.idle = True
    for way in ("delete", "abort"):
        running = asyncio.create_task(site.post(PATH, program=ENDLESS, stream=stream))
        await site.world.settle(lambda: bool(site.engine.running))
        (name,) = site.state.runs
        if way == "delete":
            reply = await site.http.delete(f"{PATH}/{name}")
            assert reply.json() == {"id": name, "object": "program", "deleted": True}
        else:
            assert (await site.post("/abort", rid=name)).json() == {"aborted": 1}
        ended = await running
        if stream:
            assert '"kind":"aborted"' in ended.text
        else:
            assert ended.status_code == 499
        await site.idle()
    assert (await site.http.delete(f"{PATH}/none")).status_code == 404


async def test_what_fails_is_told(site):
    site.engine.says("h")
    program = data(
        [
            Fork(children=(1,)),
            Gen(op=0, name="x", sampling=GREEDY),
            Text(stream=1, parts=(Ref(0, "nothing"),), line="f.py:3"),
        ]
    )
    answer = (await site.post(PATH, program=program)).json()
    assert answer["status"] == "failed"
    assert answer["values"] == {"x": "h"}
    assert "f.py:3" in answer["error"]["message"]
    assert [event["type"] for event in answer["events"]].count("failed") == 1


WRONG = (
    ({}, "program"),
    ({"program": 3}, "program"),
    ({"program": {"instructions": [{"type": "nothing"}]}}, "instructions[0]"),
    ({"program": {"instructions": [{"type": "text"}]}}, "parts"),
    ({"program": {"instructions": [{"type": "text", "parts": ["a"], "stream": 4}]}}, "stream 4"),
    ({"program": {"instructions": [{"type": "gen", "sampling": {"top_p": 7}}]}}, "top_p"),
    ({"program": {"instructions": [{"type": "gen", "sampling": {"what": 7}}]}}, "what"),
    ({"program": data([Text(parts=(Arg("a"),))])}, "argument 'a'"),
    ({"program": data([Text(parts=("a" * 600,)), Gen(op=0)])}, "512"),
    ({"program": {}, "lease": -1}, "lease"),
    ({"program": {}, "lease": 1e9}, "lease"),
    ({"program": {}, "args": []}, "args"),
    ({"program": data([Select(op=0, name="x")])}, "choice"),
)


@pytest.mark.parametrize(("body", "named"), WRONG)
async def test_what_is_wrong_is_named(site, body, named):
    reply = await site.post(PATH, **body)
    assert reply.status_code == 400, reply.text
    assert named in reply.json()["error"]["message"]
    await site.idle()


async def test_a_piece_that_is_wrong_ends_the_program(site):
    name = (await site.post(PATH, closed=False)).json()["id"]
    path = f"{PATH}/{name}/append"
    reply = await site.post(path, instructions=[{"type": "text"}])
    assert reply.status_code == 400  # not a program at all: nothing was taken in
    assert (await site.post(path)).json()["status"] == "open"
    wrong = msgspec.to_builtins([Text(stream=9, parts=("a",))])
    reply = await site.post(path, instructions=wrong)
    assert (reply.status_code, "stream 9" in reply.text) == (400, True)
    reply = await site.post(path, closed=True)
    assert (reply.status_code, "stream 9" in reply.text) == (400, True)
    await site.idle()


async def test_an_unknown_model_is_a_404(site):
    reply = await site.post(PATH, program={}, model="other")
    assert reply.status_code == 404
    assert (await site.post(PATH, program={}, model="fake")).status_code == 200


async def test_no_more_programs_at_a_time_than_allowed(new_site):
    site = await new_site(limits=HttpLimits(programs=2))
    names = [(await site.post(PATH, closed=False)).json()["id"] for _ in range(2)]
    assert (await site.http.get("/server_info")).json()["programs"] == 2
    reply = await site.post(PATH, program={})
    assert reply.status_code == 429
    assert reply.headers["retry-after"]
    await site.http.delete(f"{PATH}/{names[0]}")
    assert (await site.post(PATH, program={})).status_code == 200


async def test_a_program_that_nobody_reads_is_bounded(site, monkeypatch):
    monkeypatch.setattr(held_program, "BUFFERED_BYTES", 1000)
    monkeypatch.setattr(held_program, "TICK_S", 0.01)
    site.engine.next_token = lambda tokens: 97
    instructions = [Gen(op=op, name="x", sampling={"max_new_tokens": 8}) for op in range(50)]
    body = {"program": data(instructions), "closed": False}
    name = (await site.post(PATH, **body)).json()["id"]
    await site.world.settle(lambda: site.state.find(name).status == "done")
    lines = (await site.http.get(f"{PATH}/{name}/events")).text
    assert "1000 bytes of events wait" in lines
    await site.idle()


async def test_the_servers_end_aborts_programs(new_site):
    site = await new_site()
    site.engine.idle = True
    running = asyncio.create_task(site.post(PATH, program=ENDLESS))
    await site.world.settle(lambda: bool(site.engine.running))
    await site.server.close(0.0)
    assert (await running).status_code == 499


async def test_a_salt_keeps_programs_apart(site):
    site.engine.says("h")
    program = data([Text(parts=("ab",)), Gen(op=0, name="x", sampling=GREEDY)])
    for salt in ("one", "two", "one"):
        await site.post(PATH, program=program, cache_salt=salt)
    first, second, third = (submit.namespace for submit in site.engine.submits)
    assert first == third != second


async def test_each_key_has_programs_of_its_own(new_site):
    site = await new_site(api_key=["one", "two"])
    site.engine.says("h")
    mine, other = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    program = data([Text(parts=("ab",)), Gen(op=0, name="x", sampling=GREEDY)])
    reply = await site.http.post(PATH, json={"closed": False}, headers=mine)
    name = reply.json()["id"]
    for method, path in (
        ("GET", ""), ("DELETE", ""), ("POST", "/append"), ("GET", "/events"),
    ):  # fmt: skip
        url = f"{PATH}/{name}{path}"
        reply = await site.http.request(method, url, json={}, headers=other)
        assert reply.status_code == 404
    assert (await site.http.delete(f"{PATH}/{name}", headers=mine)).status_code == 200
    for headers in (mine, other, mine):
        await site.http.post(PATH, json={"program": program}, headers=headers)
    first, second, third = (submit.namespace for submit in site.engine.submits)
    assert first == third != second
    assert first
    await site.idle()


async def test_a_priority_goes_with_all_of_a_program(site):
    site.engine.says("h")
    program = data([Fork(children=(1,)), Gen(op=0), Gen(stream=1, op=1)], sampling=GREEDY)
    await site.post(PATH, program=program, priority=-3)
    await site.post(PATH, program=program, priority="batch")
    urgency = [(submit.priority, submit.cls) for submit in site.engine.submits]
    assert urgency == [(-3, "")] * 2 + [(0, "batch")] * 2
    name = (await site.post(PATH, closed=False, priority=5)).json()["id"]
    piece = msgspec.to_builtins([Gen(op=0, sampling=GREEDY)])
    await site.post(f"{PATH}/{name}/append", instructions=piece, closed=True)
    assert site.engine.submits[-1].priority == 5
