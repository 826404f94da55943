"""Bodies that nobody should send to programs, responses and scores: a 400 at worst, and nothing
that is held after."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from([0, 1, 2, 5, -1])
    | st.floats(-10, 10)
    | st.text(max_size=9)
    | st.sampled_from(["ab", "x", "user", "assistant", "text", "gen"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
SMALL = {"max_new_tokens": 4}
PARTS = st.lists(
    st.sampled_from(
        ["a", "é", "<eos>", {"type": "arg", "name": "a"}, {"type": "ref", "stream": 0, "name": "x"}]
    ),
    max_size=3,
)
NAME = st.sampled_from(["x", "y", ""])
ROLE = st.sampled_from(["user", "assistant", "<|im_end|>"])
CHILDREN = st.lists(st.integers(1, 4), max_size=2)
FIELDS = {
    "text": {"parts": PARTS},
    "gen": {"name": NAME},
    "select": {"name": NAME, "choices": st.lists(PARTS, max_size=3)},
    "role_begin": {"role": ROLE},
    "role_end": {"role": ROLE},
    "fork": {"children": CHILDREN},
    "join": {"children": CHILDREN, "mode": st.sampled_from(["gather_variable", "other"])},
    "bind": {"name": NAME, "parts": PARTS},
    "scope_begin": {"name": NAME},
    "scope_end": {"name": NAME},
    "sync": {"want": st.sampled_from(["text", "messages", "nothing"])},
    "warm": {},
    "end": {},
}
FLAT = st.one_of(
    *(
        st.fixed_dictionaries(
            {"type": st.just(tag), **fields},
            optional={"stream": st.sampled_from([0, 0, 0, 1, 2]), "op": st.integers(-1, 99)},
        )
        for tag, fields in FIELDS.items()
    )
)


def blocks(inner):
    """Switches and loops around other instructions."""
    arm = st.lists(inner, max_size=3)
    op = {"op": st.integers(-1, 99), "stream": st.sampled_from([0, 0, 0, 1])}
    match = {"match": st.sampled_from(["strip", "exact", "contains", "regex"])}
    condition = st.fixed_dictionaries({"value": PARTS, "texts": st.just(["a", "x"])})
    switch = {"type": st.just("switch"), "value": PARTS}
    repeat = {"type": st.just("repeat"), "body": arm, "times": st.sampled_from([0, 1, 2, 3, 10**9])}
    cases = {"cases": st.dictionaries(st.sampled_from(["a", "x"]), arm), "default": arm}
    return st.one_of(
        st.fixed_dictionaries(switch, optional={**op, **match, **cases}),
        st.fixed_dictionaries(repeat, optional={**op, "until": condition, "count": NAME}),
    )


INSTRUCTIONS = st.one_of(FLAT, FLAT, st.recursive(FLAT, blocks, max_leaves=6))
ITEMS = st.one_of(
    st.just({"role": "user", "content": "a"}),
    st.just({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}),
    st.just({"type": "function_call_output", "call_id": "c", "output": "a"}),
    st.dictionaries(
        st.sampled_from(["type", "role", "content", "name", "summary", "call_id"]), VALUES,
        max_size=3,
    ),
)  # fmt: skip


def near(good, *names):
    """A good body with up to two fields of any kind."""
    return st.builds(
        lambda own, wrong: {**own, **wrong},
        st.fixed_dictionaries(good),
        st.dictionaries(st.sampled_from(names), VALUES, max_size=2),
    )


def fuzz(site, path, bodies, examples=120):
    loop = asyncio.get_running_loop()
    statuses: list[int] = []

    @settings(
        max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(body=bodies)
    def attack(body):
        asked = asyncio.run_coroutine_threadsafe(site.http.post(path, json=body), loop)
        reply = asked.result(20)
        statuses.append(reply.status_code)
        assert reply.status_code in (200, 400, 404), (path, body, reply.text)
        if reply.status_code != 200:
            assert reply.json()["error"]["code"] == reply.status_code

    return asyncio.to_thread(attack), statuses


async def test_programs(site):
    site.engine.next_token = lambda tokens: 97
    programs = near(
        {
            "program": st.fixed_dictionaries({"instructions": st.lists(INSTRUCTIONS, max_size=4)}),
            "sampling": st.just(SMALL),
            "stream": st.booleans(),
            "args": st.just({"a": [1, {"b": None}]}),
        },
        "lease", "deltas", "cache_salt", "args", "sampling", "program", "model", "priority",
    )  # fmt: skip
    work, statuses = fuzz(site, "/v1/programs", programs, 200)
    await work
    assert 20 < statuses.count(200) < len(statuses) - 20
    await site.idle()


async def test_responses(site):
    site.engine.next_token = lambda tokens: 97
    asked = near(
        {
            "input": st.just("ab") | st.lists(ITEMS, min_size=1, max_size=3),
            "max_output_tokens": st.just(4),
            "stream": st.booleans(),
            "store": st.booleans(),
        },
        "tools", "text", "reasoning", "include", "metadata", "previous_response_id", "instructions",
        "tool_choice", "top_logprobs", "structured_outputs", "chat_template_kwargs", "truncation",
        "input", "max_output_tokens", "background", "request_id", "user", "stream_options",
    )  # fmt: skip
    work, statuses = fuzz(site, "/v1/responses", asked)
    await work
    assert statuses.count(200) > 3
    await site.idle()


async def test_scores(site):
    asked = near(
        {"query": st.just("ab"), "items": st.just(["x"]), "label_token_ids": st.just([97])},
        "query", "items", "label_token_ids", "apply_softmax", "item_first", "cache_salt",
        "request_id", "text_1", "model",
    )  # fmt: skip
    work, statuses = fuzz(site, "/v1/score", asked)
    await work
    assert statuses.count(200) > 3
    await site.idle()


@pytest.mark.parametrize("path", ["/v1/programs/x", "/v1/programs/x/append", "/v1/responses/x"])
async def test_ids_that_are_none(site, path):
    for name in ("%00", "a" * 5000, "é", "%ff", "x y", "resp_1"):
        url = path.replace("x", name)
        reply = await site.http.request("POST" if "append" in path else "GET", url, content=b"{}")
        assert reply.status_code in (400, 404), (url, reply.text)
        assert len(reply.content) < 1000


async def test_many_programs_that_are_left_alone(site):
    """Opened, fed and forgotten by their client: the leases end them all."""
    site.engine.next_token = lambda tokens: 97
    body = {"closed": False, "lease": 0.2, "sampling": SMALL,
            "program": {"instructions": [{"type": "gen", "op": 0, "name": "x"}]}}  # fmt: skip
    replies = await asyncio.gather(*(site.post("/v1/programs", **body) for _ in range(100)))
    names = {reply.json()["id"] for reply in replies}
    assert len(names) == 100
    await site.idle()
    assert not site.state.runs


async def test_a_reader_that_only_half_reads(site):
    body = {"closed": False, "stream": True}
    async with site.http.stream("POST", "/v1/programs", json=body) as reply:
        lines = reply.aiter_lines()
        name = json.loads((await anext(lines)).removeprefix("data: "))["id"]
        gens = [{"type": "gen", "op": op, "sampling": SMALL} for op in range(20)]
        await site.post(f"/v1/programs/{name}/append", instructions=gens)
    await site.idle()
    assert (await site.http.get(f"/v1/programs/{name}")).status_code == 404
