"""Sockets that misbehave before, under and after a request; and that nothing of them stays."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from ramet.runtime.gateway.http import intake

BODY = {"prompt": "ab", "max_tokens": 400, "stream": True}


def head_of(data: bytes, path: str = "/v1/completions") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()


def descriptors() -> int:
    return len(list(Path(f"/proc/{os.getpid()}/fd").iterdir()))


class Peer:
    """A client that speaks bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def at(cls, url: str) -> Peer:
        parts = urlsplit(url)
        return cls(*await asyncio.open_connection(parts.hostname, parts.port, limit=4096))

    async def answer(self) -> tuple[int, dict]:
        """Status and body of an answer after which the server closes."""
        data = await asyncio.wait_for(self.reader.read(), 5)
        head, _, body = data.partition(b"\r\n\r\n")
        return int(head.split()[1]), json.loads(body)

    def drop(self) -> None:
        self.writer.transport.abort()


@pytest.fixture
async def settled(site):
    """After the test nothing is left that was not there before: tasks, sockets, requests."""
    assert (await site.post("/v1/completions", prompt="a", max_tokens=1)).status_code == 200
    tasks, files = len(asyncio.all_tasks()), descriptors()
    yield
    await site.idle()
    await site.world.settle(lambda: len(asyncio.all_tasks()) <= tasks)
    await site.world.settle(lambda: descriptors() <= files)
    assert (await site.post("/v1/completions", prompt="a", max_tokens=1)).status_code == 200


CHAT = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 400, "stream": True}
STREAMS = {
    "/v1/completions": BODY,
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "ab", "max_output_tokens": 400, "stream": True},
    "/generate": {"text": "ab", "sampling_params": {"max_new_tokens": 400}, "stream": True},
}


@pytest.mark.parametrize("path", STREAMS)
async def test_200_that_go_away_in_mid_stream(site, settled, path):
    site.engine.next_token = lambda tokens: 97
    data = json.dumps(STREAMS[path]).encode()

    async def vanish(number: int) -> None:
        peer = await Peer.at(site.url)
        peer.writer.write(head_of(data, path) + data)
        for _ in range(1 + number % 3):
            await peer.reader.readuntil(b"data: ")
        if number % 2:
            peer.drop()
        else:
            peer.writer.close()

    await asyncio.gather(*(vanish(number) for number in range(200)))
    await site.idle()
    assert not [finish for finish in site.engine.finished[1:] if finish.reason == "stop"]


async def test_who_reads_slowly_holds_up_nobody(site, settled):
    site.engine.next_token = lambda tokens: 97
    data = json.dumps(BODY).encode()
    slow = [await Peer.at(site.url) for _ in range(30)]
    for peer in slow:
        peer.writer.write(head_of(data) + data)
    began = time.monotonic()
    replies = [await site.post("/v1/completions", prompt="b", max_tokens=3) for _ in range(10)]
    assert time.monotonic() - began < 5
    assert all(reply.status_code == 200 for reply in replies)
    for peer in slow[:15]:  # late, but whole
        data = b""
        while not data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            data += await asyncio.wait_for(peer.reader.read(1000), 5)
        assert data.count(b'"finish_reason":"length"') == 1
        peer.writer.close()
    for peer in slow[15:]:
        peer.drop()


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HT", b"GET /health HTTP/1.1\r\nX: y"])
async def test_half_a_request_is_given_up(site, settled, monkeypatch, sent):
    monkeypatch.setattr(intake, "HEAD_S", 0.3)
    peers = [await Peer.at(site.url) for _ in range(50)]
    for peer in peers:
        peer.writer.write(sent)
    assert (await site.http.get("/health")).status_code == 200
    for peer in peers:
        if sent:
            status, body = await peer.answer()
            assert (status, body["error"]["code"]) == (408, 408)
        else:
            assert await asyncio.wait_for(peer.reader.read(), 5) == b""
        peer.writer.close()


async def test_headers_that_come_in_time_are_waited_for(site, settled, monkeypatch):
    monkeypatch.setattr(intake, "HEAD_S", 0.4)
    peer = await Peer.at(site.url)
    for _ in range(3):  # also those of a second request on a connection
        for part in (b"GET /ver", b"sion HTTP/1.1\r\nHost", b": x\r\n\r\n"):
            peer.writer.write(part)
            await asyncio.sleep(0.1)
        assert (await peer.reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
    await asyncio.sleep(0.5)  # an idle connection is not half a request
    peer.writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await peer.reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
    peer.writer.close()


@pytest.mark.parametrize("line", [b"x-h: y\r\n", b"a" * 1000, b"x-h: " + b"y" * 1000])
async def test_a_flood_of_headers_is_cut_off(site, settled, line):
    peer = await Peer.at(site.url)
    peer.writer.write(b"GET /version HTTP/1.1\r\n")
    peer.writer.write(line * (1 + (1 << 20) // len(line)))
    status, body = await peer.answer()
    assert (status, body["error"]["code"]) == (431, 431)
    peer.drop()


async def test_what_is_no_http_is_a_400_in_our_form(site, settled):
    for sent in (b"hello\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00" * 20, b"GET / HTTP/9.9\r\n\r\n"):
        peer = await Peer.at(site.url)
        peer.writer.write(sent)
        status, body = await peer.answer()
        assert (status, body["error"]["code"]) == (400, 400)
        peer.writer.close()


async def test_a_body_of_64_mb(site, settled):
    body = b'{"prompt": "' + b"x" * (64 << 20) + b'"}'
    began = time.monotonic()
    reply = await site.http.post("/v1/completions", content=body)
    assert reply.status_code == 413
    assert time.monotonic() - began < 5


async def test_a_body_shorter_than_it_was_said_to_be(site, settled):
    for data in (b"", b'{"prompt": "a'):
        peer = await Peer.at(site.url)
        peer.writer.write(head_of(b"x" * 100) + data)
        await asyncio.sleep(0.05)
        peer.drop()


async def test_prompts_of_a_million_tokens(site, settled):
    began = time.monotonic()
    for prompt in ([97] * 1_000_000, "ab" * 1_000_000):
        reply = await site.post("/v1/completions", prompt=prompt)
        assert reply.status_code == 400
        assert "context" in reply.json()["error"]["message"]
    assert time.monotonic() - began < 10
    assert len(site.engine.submits) == 1
