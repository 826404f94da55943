"""What clients get wrong, and what they do on purpose: a right status, and nothing held after."""

from __future__ import annotations

import asyncio
import functools
import json
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ramet.runtime.gateway import detokenizer
from ramet.runtime.gateway.http import answers, reading
from ramet.runtime.gateway.http.state import HttpLimits

COMPLETION = {"model": "fake", "prompt": "ab", "max_tokens": 4}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
PATHS = (
    COMPLETIONS, CHATS, "/generate", "/tokenize", "/detokenize", "/abort", "/v1/responses",
    "/v1/programs", "/v1/score",
)  # fmt: skip


def checked(reply, status: int, param: str | None = None) -> str:
    """An error in the right form; returns its message."""
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == status
    if param is not None:
        assert error["param"] == param
        assert param in error["message"]
    assert len(reply.content) < 2000
    return error["message"]


MALFORMED = (
    b"", b"{", b"[]", b"null", b"1", b'{"a": NaN}', b'{"a": Infinity}', b'{"a": 1e999}',
    b'{"prompt": "\xff\xfe"}', b'{"prompt": "\\ud800"}', b"[" * 200_000,
    b'{"a":' * 50_000, b"\x00" * 100, b'{"prompt": "a"}garbage',
)  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
async def test_what_is_no_json_object_is_refused(site, path):
    for data in MALFORMED:
        checked(await site.http.post(path, content=data), 400)


DEEP = functools.reduce(lambda inner, _: {"a": inner}, range(900), {})
TOOL = {"type": "function", "function": {"name": "a"}}
WRONG = (
    (COMPLETIONS, COMPLETION, (
        {"prompt": 3}, {"prompt": [1, "a"]}, {"prompt": []}, {"max_tokens": "many"},
        {"max_tokens": -1}, {"max_tokens": 0}, {"n": 0}, {"n": 100_000}, {"temperature": -1},
        {"temperature": [1]}, {"top_p": 7}, {"seed": 10**30}, {"stop": ["x"] * 10_000},
        {"stop": [""]}, {"stop_token_ids": [10**9]}, {"logit_bias": {"x": 1}},
        {"logit_bias": {"99999": 1}}, {"logprobs": 1000}, {"best_of": 2}, {"suffix": "x"},
        {"use_beam_search": True}, {"guided_regex": "a+"}, {"structured_outputs": {"regex": 3}},
        {"structured_outputs": {"regex": "a", "json": {}}}, {"structured_outputs": {}},
        {"structured_outputs": {"choice": []}}, {"structured_outputs": {"structural_tag": "x"}},
        {"response_format": {"type": "json_schema"}}, {"response_format": {"type": "xml"}},
        {"structured_outputs": {"regex": "("}}, {"tools": [{}]}, {"tool_choice": "required"},
        {"stream_options": {"include_usage": True}},
    )),
    (CHATS, CHAT, (
        {"messages": []}, {"messages": "hello"}, {"messages": [{"content": "a"}]},
        {"messages": [{"role": "user"}]}, {"messages": [{"role": "a<eos>", "content": "b"}]},
        {"messages": [{"role": "\ue0007\ue001", "content": "b"}]},
        {"messages": [{"role": ["user"], "content": "b"}]},
        {"messages": [{"role": "bot", "content": "b"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        {"messages": [{"role": "assistant", "reasoning_content": 3}]},
        {"response_format": {"type": "json_schema"}}, {"tools": []}, {"tools": [{"type": "x"}]},
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": 3}}]},
        {"tools": [TOOL, TOOL]}, {"tools": [{"type": "function"}]}, {"tool_choice": "required"},
        {"top_logprobs": 2}, {"max_completion_tokens": 1.5}, {"chat_template": "{{ x }}"},
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": DEEP}}]},
        {"messages": [{"role": "assistant", "tool_calls": [
            {"function": {"name": "a", "arguments": json.dumps(DEEP)}}]}]},
        {"chat_template_kwargs": DEEP},
        {"chat_template_kwargs": {"messages": []}}, {"chat_template_kwargs": 3},
    )),
    ("/generate", {"text": "a"}, (
        {"sampling_params": 3}, {"sampling_params": {"temperature": -1}},
        {"sampling_params": {"regex": "a", "ebnf": "b"}}, {"sampling_params": {"regex": 3}},
    )),
    ("/detokenize", {}, (
        {"tokens": [10**9]},
    )),
)  # fmt: skip


@pytest.mark.parametrize(("path", "good", "wrongs"), WRONG)
async def test_a_wrong_field_is_named(site, path, good, wrongs):
    for wrong in wrongs:
        message = checked(await site.post(path, **{**good, **wrong}), 400)
        ((name, value),) = wrong.items()
        inner = tuple(value) if isinstance(value, dict) else ()
        assert any(part in message for part in (name, "max_tokens", "token id", *inner)), message
    assert site.engine.submits == []


@pytest.mark.parametrize(("path", "good"), [(COMPLETIONS, COMPLETION), (CHATS, CHAT)])
async def test_nulls_harmless_extras_and_defaults_are_taken(site, path, good):
    nulls = dict.fromkeys(
        (
            "temperature", "top_p", "n", "stop", "seed", "logit_bias", "logprobs", "stream",
            "stream_options", "user", "response_format", "tools", "tool_choice", "best_of",
            "guided_json", "suffix", "priority", "top_k", "chat_template_kwargs",
        ),
    )  # fmt: skip
    extras = {"best_of": 1, "user": "me", "store": False, "unheard_of": {"a": [1]}, "priority": 0}
    site.engine.next_token = lambda tokens: 97
    for more in (nulls, extras, {"response_format": {"type": "text"}}):
        reply = await site.post(path, **{**good, **more})
        assert reply.status_code == 200, reply.text


async def test_what_comes_back_of_the_input_is_cut(site):
    for body in ({"model": "m" * 100_000}, {"prompt": {"x" * 5000: 1}}, {"stop": ["y" * 90_000]}):
        reply = await site.post("/v1/completions", **{**COMPLETION, **body})
        assert len(reply.content) < 1500


async def test_a_body_that_is_too_large(new_site):
    site = await new_site(limits=HttpLimits(body_bytes=10_000))
    checked(await site.http.post("/v1/completions", content=b"x" * 100_000), 413)

    async def unannounced():
        for _ in range(50):
            yield b"y" * 1000

    checked(await site.http.post("/v1/completions", content=unannounced()), 413)


async def test_headers_are_bounded(site):
    many = [(f"x-{i}", "v") for i in range(300)]
    checked(await site.http.get("/v1/models", headers=many), 431)


async def test_unknown_paths_and_methods(site):
    checked(await site.http.get("/nothing"), 404)
    checked(await site.http.get("/v1/completions"), 405)
    checked(await site.http.get("/v1/models/other"), 404)


async def test_the_key_guards_all_but_probes(new_site):
    site = await new_site(api_key="right")
    for path in ("/v1/models", "/server_info", "/nothing"):
        for headers in (
            {"Authorization": "Bearer wrong"}, {"Authorization": "right"}, {"Authorization": ""},
            {"Authorization": "Bearer"}, {"Authorization": b"Bearer \xff\xfe"},
            [("Authorization", "Bearer right"), ("Authorization", "Bearer right")],
        ):  # fmt: skip
            checked(await site.http.get(path, headers=headers), 401)
    assert (await site.http.get("/v1/models")).status_code == 200
    for path in ("/health", "/ready", "/metrics"):
        reply = await site.http.get(path, headers={"Authorization": "Bearer wrong"})
        assert reply.status_code == 200


async def test_loading_says_503(new_site):
    site = await new_site(loading=True)
    for path in ("/health", "/ready", "/v1/models", "/server_info"):
        reply = await site.http.get(path)
        assert "loading" in checked(reply, 503)
        assert reply.headers["retry-after"]
    checked(await site.post("/v1/completions", **COMPLETION), 503)
    assert (await site.http.get("/metrics")).status_code == 200


async def test_too_many_requests_are_told_to_come_again(new_site):
    site = await new_site(limits=HttpLimits(requests=2))
    site.engine.idle = True
    running = [asyncio.create_task(site.post("/v1/completions", **COMPLETION)) for _ in range(2)]
    await site.world.settle(lambda: len(site.state.runs) == 2)
    for stream in (False, True):
        reply = await site.post("/v1/completions", **COMPLETION, stream=stream)
        checked(reply, 429)
        assert reply.headers["retry-after"]
    site.engine.idle = False
    assert [(await task).status_code for task in running] == [200, 200]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_dies_before_the_first_token_is_a_503(site, stream):
    site.engine.idle = True
    waiting = asyncio.create_task(site.post("/v1/completions", **COMPLETION, stream=stream))
    await site.world.settle(lambda: bool(site.engine.running))
    site.engine.die()
    checked(await waiting, 503)
    checked(await site.post("/v1/completions", **COMPLETION), 503)
    checked(await site.http.get("/health"), 503)


async def test_an_engine_that_dies_in_a_stream_is_one_error_event(site):
    site.engine.next_token = lambda tokens: 97
    body = {**COMPLETION, "max_tokens": 400, "stream": True}
    async with site.http.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.aiter_lines()
        assert json.loads((await anext(lines)).removeprefix("data: "))["choices"]
        site.engine.die()
        rest = [line.removeprefix("data: ") async for line in lines if line]
    assert rest[-1] == "[DONE]"
    assert json.loads(rest[-2])["error"]["code"] == 503
    assert all("choices" in json.loads(line) for line in rest[:-2])


@pytest.mark.parametrize("stream", [False, True])
async def test_an_abort_ends_exactly_that_request(site, stream):
    site.engine.next_token = lambda tokens: 97
    site.engine.idle = not stream
    body = {**COMPLETION, "max_tokens": 400, "stream": stream, "request_id": "mine"}
    other = asyncio.create_task(site.post("/v1/completions", **COMPLETION))
    mine = asyncio.create_task(site.post("/v1/completions", **body))
    await site.world.settle(lambda: len(site.state.runs) == 2)
    again = await site.post("/v1/completions", **body)
    assert "running already" in checked(again, 400)
    reply = await site.post("/abort", rid="cmpl-mine")
    assert reply.json() == {"aborted": 1}
    site.engine.idle = False
    if (ended := await mine).status_code == 200:
        assert '"code":499' in ended.text
        assert ended.text.endswith("data: [DONE]\n\n")
    else:
        checked(ended, 499)
    assert (await other).status_code == 200
    await site.idle()


async def test_100_clients_that_go_away(site):
    site.engine.next_token = lambda tokens: 97
    parts = urlsplit(site.url)
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        for stream in (False, True):
            data = json.dumps({**body, "max_tokens": 400, "stream": stream}).encode()
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"

            async def vanish(number: int, head: str = head, data: bytes = data) -> None:
                _, writer = await asyncio.open_connection(parts.hostname, parts.port)
                writer.write(head.encode() + data[: len(data) - (number % 5 == 0)])
                await writer.drain()
                await asyncio.sleep(0.002 * (number % 7))
                writer.transport.abort()

            await asyncio.gather(*(vanish(number) for number in range(25)))
    await site.idle()
    assert (await site.post("/v1/completions", **COMPLETION)).status_code == 200
    assert all(finish.reason != "stop" for finish in site.engine.finished[:-1])


async def test_a_client_that_does_not_read_is_given_up(site, monkeypatch):
    monkeypatch.setattr(answers, "SEND_S", 0.2)
    word = "word " * 4000
    monkeypatch.setattr(detokenizer.Detokenizer, "push", lambda self, tokens: self._keep(word))
    site.engine.next_token = lambda tokens: 97
    parts = urlsplit(site.url)
    data = json.dumps({**COMPLETION, "max_tokens": 500, "stream": True}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    _, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1000)
    writer.write(head.encode() + data)
    await site.world.settle(lambda: bool(site.state.runs))
    await site.idle()
    writer.transport.abort()


async def test_a_body_that_never_comes_is_given_up(site, monkeypatch):
    monkeypatch.setattr(reading, "BODY_S", 0.1)

    async def slow():
        yield b"{"
        await asyncio.sleep(0.5)

    checked(await site.http.post(COMPLETIONS, content=slow()), 408)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(-10, 10)
    | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = st.sampled_from(
    [
        "prompt", "messages", "max_tokens", "n", "stop", "temperature", "top_k", "logprobs", "echo",
        "stream", "stream_options", "seed", "logit_bias", "stop_token_ids", "tools", "min_tokens",
        "response_format", "text", "input_ids", "sampling_params", "rid", "tokens", "cache_salt",
        "request_id", "prompt_logprobs", "top_logprobs", "return_logprob", "best_of", "modalities",
    ]
)  # fmt: skip


async def test_no_body_breaks_the_server(site):
    loop = asyncio.get_running_loop()

    @settings(
        max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(
        path=st.sampled_from(PATHS),
        base=st.sampled_from([{}, COMPLETION, CHAT, {"text": "a"}]),
        wrong=st.dictionaries(NAMES, VALUES, max_size=4),
    )
    def attack(path, base, wrong):
        body = {**base, **wrong}
        asked = asyncio.run_coroutine_threadsafe(site.http.post(path, json=body), loop)
        reply = asked.result(20)
        assert reply.status_code in (200, 400, 404), (path, body, reply.text)
        if reply.status_code != 200:
            checked(reply, reply.status_code)

    await asyncio.to_thread(attack)
    await site.idle()
