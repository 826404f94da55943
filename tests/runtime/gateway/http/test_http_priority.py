"""How urgent a request is, from its body to the engine; and a queue that says when it is full."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import pytest
import ramet as rt
from ramet.runtime.protocol import BadInputError

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
PROGRAM = {
    "program": {
        "instructions": [
            {"type": "text", "parts": ["ab"]},
            {"type": "gen", "op": 0, "name": "x", "sampling": {"max_tokens": 2}},
        ]
    }
}
BODIES = (
    (COMPLETIONS, {"prompt": "ab", "max_tokens": 2}),
    (COMPLETIONS, {"prompt": ["ab", "cd"], "n": 2, "max_tokens": 2, "stream": True}),
    (CHATS, CHAT),
    (CHATS, {**CHAT, "stream": True}),
    ("/generate", {"text": "ab", "sampling_params": {"max_new_tokens": 2}}),
    ("/v1/responses", {"input": "ab", "max_output_tokens": 2}),
    ("/v1/programs", PROGRAM),
)


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_every_way_in_carries_it_to_the_engine(site, path, body):
    for priority, number, name in ((7, 7, ""), (-3, -3, ""), ("batch", 0, "batch"), (None, 0, "")):
        before = len(site.engine.submits)
        reply = await site.post(path, **body, priority=priority)
        assert reply.status_code == 200, reply.text
        fresh = site.engine.submits[before:]
        assert fresh
        assert {(submit.priority, submit.cls) for submit in fresh} == {(number, name)}
    before = len(site.engine.submits)
    await site.post(path, **body)
    assert {s.priority for s in site.engine.submits[before:]} == {0}, "it outlived its request"


@pytest.mark.parametrize("wrong", [1.5, [], {}, True, "", "x" * 65, 10**9, -(10**9), 2**70])
async def test_what_is_no_priority_is_named(site, wrong):
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHATS, CHAT), ("/generate", {"text": "a"})):
        reply = await site.post(path, **body, priority=wrong)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "priority"
    assert not site.engine.submits


class Asked(threading.Thread):
    """A completion that is asked for in a thread; ``done_at`` orders them."""

    def __init__(self, url: str, **body: Any) -> None:
        super().__init__(daemon=True)
        self._call = url + COMPLETIONS, {"temperature": 0, "ignore_eos": True, **body}
        self.start()

    def run(self) -> None:
        url, body = self._call
        self.reply = httpx.post(url, json=body, timeout=60)
        self.done_at = time.monotonic()


def waiting(url: str) -> int:
    return httpx.get(url + "/server_info").json()["requests"]["waiting"]


def wait_until_waiting(url: str, count: int) -> None:
    deadline = time.monotonic() + 20
    while waiting(url) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_urgent_overtake_in_a_real_queue(launched):
    url = launched(max_running_requests=1).url
    first = Asked(url, prompt="hold the only place", max_tokens=1800)
    deadline = time.monotonic() + 20
    while not httpx.get(url + "/server_info").json()["requests"]["running"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    asked: dict[str, Asked] = {}
    for count, (name, priority) in enumerate(
        {"batch": "batch", "late": 3, "plain": None, "soon": -1}.items(), 1
    ):
        asked[name] = Asked(url, prompt=name, max_tokens=20, priority=priority)
        wait_until_waiting(url, count)
    for thread in (first, *asked.values()):
        thread.join(60)
        assert thread.reply.status_code == 200
    order = sorted(asked, key=lambda name: asked[name].done_at)
    assert order == ["soon", "plain", "late", "batch"]


def test_a_full_queue_says_when_to_come_again(launched):
    running = launched(
        max_running_requests=1, max_queued_requests=3, max_queued_tokens=200,
        priority_classes={"small": {"context_length": 16, "max_queued": 1}},
    )  # fmt: skip
    url = running.url
    asked = [Asked(url, prompt="hold", max_tokens=1800)]
    deadline = time.monotonic() + 20
    while not httpx.get(url + "/server_info").json()["requests"]["running"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    asked.append(Asked(url, prompt="x" * 150, max_tokens=1))
    wait_until_waiting(url, 1)
    asked.append(Asked(url, prompt="x", max_tokens=100, priority="small"))
    wait_until_waiting(url, 2)

    def refused(**body: Any) -> str:
        reply = httpx.post(url + COMPLETIONS, json={"max_tokens": 1, **body}, timeout=30)
        assert reply.status_code == 429, reply.text
        assert int(reply.headers["retry-after"]) >= 1
        assert reply.json()["error"]["type"] == "RateLimitError"
        return reply.json()["error"]["message"]

    assert "200 prompt tokens" in refused(prompt="x" * 60)
    assert "class small is full" in refused(prompt="x", priority="small")
    assert "class small is full" in refused(prompt="x", priority="small", stream=True)
    asked.append(Asked(url, prompt="y", max_tokens=1))
    wait_until_waiting(url, 3)
    assert "3 requests" in refused(prompt="z")
    reply = httpx.post(url + COMPLETIONS, json={"prompt": "x", "priority": "no-such"})
    assert reply.status_code == 400
    assert "there are batch, interactive, small" in reply.json()["error"]["message"]
    for thread in asked:
        thread.join(60)
        assert thread.reply.status_code == 200
    assert asked[2].reply.json()["usage"]["completion_tokens"] == 15, "its class's context"
    text = httpx.get(url + "/metrics").text
    assert 'ramet:requests_rejected_total{engine="0",model_name="tiny",reason="queue"} 4.0' in text


def test_batch_makes_way_in_the_real_engine(launched):
    """And what is sent back says in the end what it would have said undisturbed."""
    url = launched(max_running_requests=1).url
    body = {"prompt": "a long answer", "max_tokens": 1800, "priority": "batch"}
    alone = Asked(url, **body)
    alone.join(60)
    batch = Asked(url, **body)
    deadline = time.monotonic() + 20
    while not httpx.get(url + "/server_info").json()["requests"]["running"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    urgent = Asked(url, prompt="now", max_tokens=5)
    for thread in (batch, urgent):
        thread.join(60)
        assert thread.reply.status_code == 200
    assert urgent.done_at < batch.done_at
    assert batch.reply.json()["choices"] == alone.reply.json()["choices"]
    assert httpx.get(url + "/server_info").json()["retracted"] == 1


def test_a_program_s_connection_has_a_priority(launched):
    running = launched(max_running_requests=1)
    address = next(a for a in running.addresses if a.startswith("tcp://"))
    with rt.RuntimeEndpoint(address, priority="batch") as backend:
        assert backend.generate("a", sampling_params={"max_new_tokens": 2})["output_ids"]
    with pytest.raises(BadInputError, match="no class 'urgent'"):
        with rt.RuntimeEndpoint(address, priority="urgent") as backend:
            backend.generate("a", sampling_params={"max_new_tokens": 2})
