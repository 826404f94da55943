"""Ids, names, broken bodies and foreign pages: what is odd about one request at a time."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from ramet.runtime.gateway.http import reading
from ramet.runtime.gateway.http.conversation import ROLES
from ramet.runtime.gateway.http.state import HttpLimits
from ramet.runtime.gateway.tokenizer import Tokenizer

CHAT = {"messages": [{"role": "user", "content": "a"}]}
ASKS = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {**CHAT, "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/score": {"query": "a", "items": ["b"], "label_token_ids": [1]},
}


def refused(reply, param: str | None = None) -> str:
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    return error["message"]


# --- ids and names --------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKS)
async def test_an_id_that_no_header_can_carry_is_refused(site, path, stream):
    extra = {} if path == "/v1/score" else {"stream": stream}
    for name in ("日本", "é", "a\nb", "a\r\nX-Evil: 1", "x" * 129):
        refused(await site.post(path, **ASKS[path], **extra, request_id=name), "request_id")
    reply = await site.http.post(path, json=ASKS[path], headers={"X-Request-Id": b"\xe9"})
    refused(reply, "request_id")
    assert not site.engine.finished, "nothing was computed for them"
    await site.idle()


@pytest.mark.parametrize("rid", ["a\nb", "x" * 129, "日本"])
async def test_ids_of_the_native_form_are_bounded_too(site, rid):
    asked = {"sampling_params": {"max_new_tokens": 1}}
    refused(await site.post("/generate", text="a", rid=rid, **asked), "rid")
    refused(await site.post("/generate", text=["a", "b"], rid=["x", rid], **asked), "rid")
    reply = await site.post("/generate", text="a", rid="", **asked)
    assert reply.json()["meta_info"]["id"], "none at all is the same as no id"


@pytest.mark.parametrize(
    ("given", "param"),
    [({"max_tokens": 10**30}, "max_tokens"), ({"max_tokens": 2, "min_tokens": 3}, "min_tokens")],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_an_error_names_a_field_as_the_client_wrote_it(site, path, given, param):
    message = refused(await site.post(path, **ASKS[path] | given), param)
    assert param in message
    assert "new_tokens" not in message


@pytest.mark.parametrize("field", [{"prompt": {"id": "pmpt_1"}}, {"prompt_logprobs": 2}])
async def test_a_response_refuses_what_it_would_leave_out(site, field):
    refused(await site.post("/v1/responses", input="a", **field), next(iter(field)))


async def test_the_list_of_models_with_a_slash_is_the_list(site):
    assert (await site.http.get("/v1/models/")).json()["object"] == "list"


async def test_fields_that_mean_nothing_are_told_of_once(site, caplog):
    caplog.set_level(logging.INFO)
    for _ in range(3):
        await site.post("/v1/completions", prompt="a", max_tokens=1, brand_new=1, other=2)
    lines = [r.getMessage() for r in caplog.records if "brand_new" in r.getMessage()]
    assert len(lines) == 1
    assert "other" in lines[0]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_a_role_that_nobody_knows_is_refused(site, path):
    plain = site.world.executor.tokenizer
    template = (
        "{% for m in messages %}{{ 'saw ' if m.role == 'observer' }}{{ m.content }}{% endfor %}"
    )
    site.world.executor.tokenizer = Tokenizer(
        plain.inner, eos_ids=plain.eos_ids, chat_template=template
    )

    async def say(role):
        return await site.post(path, messages=[*CHAT["messages"], {"role": role, "content": "b"}])

    message = refused(await say("bot"), "messages")
    assert message == f"messages[1].role 'bot' is none of {', '.join(ROLES)}"
    for role in (*ROLES, "observer"):
        assert (await say(role)).status_code == 200, role


# --- lengths --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_a_chat_takes_at_least_one_token(site, name):
    for count in (0, -3):
        message = refused(
            await site.post("/v1/chat/completions", **CHAT, **{name: count}), "max_tokens"
        )
        assert message == f"max_tokens must be at least 1, not {count}"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_a_chat_may_take_what_the_context_leaves(site, path):
    site.engine.next_token = lambda tokens: 97
    site.world.executor.context_length = 3000
    asked = {name: value for name, value in ASKS[path].items() if "max" not in name}
    counts = (await site.post(path, **asked)).json()["usage"]
    assert counts["total_tokens"] == 3000
    site.world.client_of_engine.info["num_slots"] = 2000
    counts = (await site.post(path, **asked)).json()["usage"]
    assert counts["total_tokens"] == 2000, "no more than KV memory holds"


# --- what is no HTTP ------------------------------------------------------------------------------

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


async def exchange(url: str, sent: bytes) -> bytes:
    """All that the server says until it hangs up."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(sent)
    try:
        return await asyncio.wait_for(reader.read(), 5)
    finally:
        writer.close()


@pytest.mark.parametrize(
    "sent",
    [
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabcdef\r\n",
        HEAD + b"Transfer-Encoding: gzip\r\n\r\n",
    ],
)
async def test_a_body_that_is_no_http_is_a_400(site, sent):
    data = await exchange(site.url, sent)
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.split()[1] == b"400", data
    assert json.loads(body)["error"]["code"] == 400
    assert data.count(b"HTTP/1.1") == 1
    await site.idle()


async def test_what_follows_a_request_does_not_take_its_answer(site):
    body = b'{"prompt": "ab", "max_tokens": 3}'
    whole = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    data = await exchange(site.url, whole + b"no HTTP at all\r\n\r\n")
    assert data.startswith(b"HTTP/1.1 200"), data
    assert b'"finish_reason":"length"' in data
    assert data.count(b"HTTP/1.1") == 1


# --- pages of other sites -------------------------------------------------------------------------

PLAIN = {"Content-Type": "text/plain"}  # what a page may send without asking first


@pytest.mark.parametrize(
    ("headers", "is_foreign"),
    [
        ({"Origin": "https://evil.example"}, True),
        ({"Origin": "null"}, True),
        ({"Sec-Fetch-Site": "cross-site"}, True),
        ({"Sec-Fetch-Site": "same-site", "Origin": "http://localhost:3000"}, True),
        ({"Sec-Fetch-Site": "same-origin", "Origin": "https://behind.a.proxy"}, False),
        ({"Sec-Fetch-Site": "none"}, False),
        ({"Origin": "http://here.example:80", "Host": "here.example:80"}, False),
        ({}, False),
    ],
)
async def test_a_page_of_another_site_sets_nothing_going(site, headers, is_foreign):
    sent = json.dumps(ASKS["/v1/completions"])
    reply = await site.http.post("/v1/completions", content=sent, headers={**PLAIN, **headers})
    assert reply.status_code == (403 if is_foreign else 200)
    if is_foreign:
        assert "--cors-origin" in reply.json()["error"]["message"]
        assert not site.engine.finished
    reply = await site.http.get("/flush_cache", headers=headers)  # by an <img>
    assert reply.status_code == (403 if is_foreign else 200)
    assert (await site.http.get("/v1/models", headers=headers)).status_code == 200


async def test_a_page_that_was_told_of_may(new_site):
    origin = "https://pages.example"
    site = await new_site(serving={"cors_origins": [origin]})
    sent = json.dumps(ASKS["/v1/completions"])
    for name, status in ((origin, 200), ("https://evil.example", 403)):
        headers = {**PLAIN, "Origin": name, "Sec-Fetch-Site": "cross-site"}
        reply = await site.http.post("/v1/completions", content=sent, headers=headers)
        assert reply.status_code == status
    everybody = await new_site(serving={"cors_origins": ["*"]})
    headers = {**PLAIN, "Origin": "https://evil.example"}
    reply = await everybody.http.post("/v1/completions", content=sent, headers=headers)
    assert reply.status_code == 200


async def test_who_has_the_key_may_come_from_any_page(new_site):
    site = await new_site(api_key="key")
    headers = {"Origin": "https://pages.example", "Sec-Fetch-Site": "cross-site"}
    reply = await site.http.post("/v1/completions", json=ASKS["/v1/completions"], headers=headers)
    assert reply.status_code == 200


# --- too much of it -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"a": [[]] * 4000}}),
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": "a"}] * 1500}),
        ("/generate", {"input_ids": [[1]] * 4000}),
        ("/generate", {"input_ids": [1] * 5000}),
        ("/detokenize", {"tokens": [1] * 5000}),
        ("/v1/programs", {"program": {"instructions": [{"type": "text", "parts": ["a"]}] * 2000}}),
        ("/v1/completions", {"prompt": "a", **{str(number): 1 for number in range(5000)}}),
    ],
)
async def test_bodies_of_too_many_values_are_refused_before_anything_looks(new_site, path, body):
    site = await new_site(limits=HttpLimits(body_bytes=1 << 16))
    reply = await site.post(path, **body)
    assert reply.status_code == 413, reply.text[:200]
    assert "4096 values" in reply.json()["error"]["message"]


async def test_what_stands_in_a_text_is_no_value(new_site):
    site = await new_site(limits=HttpLimits(body_bytes=1 << 16))
    site.world.executor.context_length = 1 << 15
    reply = await site.post("/v1/completions", prompt=',[{"\\' * 3000, max_tokens=1)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("data", [b'"' + b'\\"' * 500_000, b'"' * 1_000_001, b"\\" * 1_000_000])
def test_counting_takes_no_time_whatever_the_text(data):
    began = time.monotonic()
    reading.holds_more(data + b"," * 10, 5)
    assert time.monotonic() - began < 2


async def test_calls_that_a_conversation_holds_are_bounded(site):
    call = {"function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "tool_calls": [call] * 3000}
    asked = {"messages": [message, message], "max_tokens": 1}
    assert "tool_calls" in refused(await site.post("/v1/chat/completions", **asked), "messages")
    call = {"function": {"name": "f", "arguments": '{"a": [' + "1," * 70_000 + "1]}"}}
    asked = {"messages": [{"role": "assistant", "tool_calls": [call]}], "max_tokens": 1}
    assert "values" in refused(await site.post("/v1/chat/completions", **asked), "messages")


async def test_bodies_on_their_way_are_bounded_together(site, monkeypatch):
    monkeypatch.setattr(reading, "MOST_COMING_BYTES", 100_000)
    parts = urlsplit(site.url)
    peers = [await asyncio.open_connection(parts.hostname, parts.port) for _ in range(3)]
    for _, writer in peers:
        writer.write(HEAD + b"Content-Length: 60000\r\n\r\n" + b" " * 50_000)
    await asyncio.sleep(0.3)
    statuses: list[bytes] = []
    for reader, writer in peers:
        writer.write(b" " * 10_000)
        statuses.append((await asyncio.wait_for(reader.readuntil(b"}}"), 5)).split()[1])
        writer.close()
    assert statuses.count(b"429") >= 1, statuses
    assert set(statuses) <= {b"429", b"400"}
    assert (await site.post("/v1/completions", prompt="a", max_tokens=1)).status_code == 200


def test_a_gateway_may_have_as_many_connections_as_the_system_lets_it(launched):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        server = launched()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    limits = Path(f"/proc/{server.pids['gateway']}/limits").read_text()
    (line,) = [line for line in limits.splitlines() if line.startswith("Max open files")]
    assert int(line.split()[3]) == min(hard, 1 << 16)


@pytest.mark.parametrize(
    ("param", "given"),
    [
        ("chat_template_kwargs", {"a": [[]] * 70_000}),
        ("tools", [{"type": "function", "function": {"name": "f", "x": [1] * 70_000}}]),
    ],
)
async def test_what_templates_walk_is_bounded(site, param, given):
    reply = await site.post("/v1/chat/completions", **CHAT, max_tokens=1, **{param: given})
    assert "values" in refused(reply, param)
