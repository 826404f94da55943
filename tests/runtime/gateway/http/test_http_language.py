"""The language over HTTP: the same programs as over ZMQ, to the same values."""

from __future__ import annotations

import asyncio
import json
import math
import os
import threading
from typing import Any

import msgspec
import pytest
import ramet as rt
from ramet.backends import http_programs
from ramet.backends.http_generation import HttpConnection
from ramet.runtime.program.events import Value
from ramet.runtime.protocol.messages import AbortGenerate, Generate
from ramet.runtime.protocol.meta import ChoiceScore, MetaInfo


@pytest.fixture
async def backends(site):
    """One over HTTP, one over ZMQ, of the same server."""
    made = [
        await asyncio.to_thread(rt.RuntimeEndpoint, address)
        for address in (site.url, site.world.address)
    ]
    yield made
    for backend in made:
        await asyncio.to_thread(backend.shutdown)
    await site.idle()


@rt.function
def tips(s, topic):
    s += rt.user(f"About {topic}.")
    s += rt.assistant_begin()
    branches = s.fork(2)
    for seed, branch in enumerate(branches):
        branch += "Tip: " + rt.gen("tip", max_tokens=6, seed=seed)
    branches.join()
    with s.var_scope("all"):
        s += "Best: " + rt.select("best", ["ab", "cd"])
    s += rt.gen("why", max_tokens=3, temperature=0) + rt.assistant_end()


def run(function: Any, backend: Any, **arguments: Any) -> Any:
    state = function.run(backend=backend, **arguments)
    state.sync()
    return state


async def test_a_program_gives_the_same(backends):
    states = [await asyncio.to_thread(run, tips, b, topic="x") for b in backends]
    for name in ("tip", "best", "why", "all"):
        assert states[0][name] == states[1][name]
    assert states[0].text() == states[1].text()
    assert states[0].messages() == states[1].messages()
    metas = [state.get_meta_info("best") for state in states]
    assert metas[0]["choices"] == metas[1]["choices"]
    scores = [meta["normalized_prompt_logprobs"] for meta in metas]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)
    assert states[0].get_meta_info("why")["completion_tokens"] == 3


async def test_python_that_looks_at_values_in_between(backends, site):
    site.engine.says("h", "i")

    @rt.function
    def ask(s):
        for number in range(3):
            s += f"{number}:" + rt.gen("x", max_tokens=4)
            if s["x"] == "hi":
                s += "!"

    states = [await asyncio.to_thread(run, ask, backend) for backend in backends]
    assert states[0].text() == states[1].text() == "0:hi!1:hi!2:hi!"


@rt.function
def agent(s, task):
    s += f"Task {task}"
    s["why"] = "none"

    def turn(s):
        forks = s.fork(2)
        for seed, fork in enumerate(forks):
            fork += f" {seed}:" + rt.gen("idea", max_tokens=4, seed=seed)
        s["mine"] = forks[0]["idea"]
        forks.join()
        s += rt.select("act", ["ab", "cd"])
        s.switch(s["act"], {"ab": "!" + rt.gen("why", max_tokens=2)}, s["mine"])

    s.repeat(turn, 3, until=lambda s: rt.matches(s["why"], "z", match="contains"), count="turn")
    s += "Turn " + s["turn"]


async def test_a_loop_gives_the_same_whole_and_line_by_line(backends):
    whole = agent.compile(task="x")
    states = [await asyncio.to_thread(run, whole, b, temperature=0) for b in backends]
    states += [await asyncio.to_thread(run, agent, b, task="x", temperature=0) for b in backends]
    for state in states[1:]:
        assert state.text() == states[0].text()
        for name in ("idea", "mine", "act", "why", "turn"):
            assert state[name] == states[0][name]
            assert state.history(name) == states[0].history(name)
    assert states[0]["turn"] == "3"
    assert len(states[0].history("act")) == 3


def test_a_score_that_is_no_number():
    scores = [
        ChoiceScore(text=text, input_token_logprobs=[], normalized_prompt_logprobs=value)
        for text, value in (("x", math.nan), ("y", -1.0))
    ]
    sent = Value(stream=0, op=1, name="x", value="y", meta=MetaInfo(choices=scores))
    event = http_programs._decoded(msgspec.json.encode(sent).decode())
    first, second = (score.normalized_prompt_logprobs for score in event.meta.choices)
    assert math.isnan(first)
    assert second == -1.0
    with pytest.raises(msgspec.ValidationError):
        http_programs._decoded('{"type": "value", "op": "x", "stream": 0}')


async def test_constraints_and_types_travel(backends, site):
    site.engine.says("4", "2")

    @rt.function
    def ask(s):
        s += rt.gen("x", regex="[0-9]+") + rt.gen_int("y")

    state = await asyncio.to_thread(run, ask, backends[0])
    assert (state["x"], state.value("y")) == ("42", 42)
    first, second = (submit.sampling.constraint for submit in site.engine.submits)
    assert (first.kind, first.spec) == ("regex", "[0-9]+")
    assert second is not None


async def test_a_forked_process_has_connections_of_its_own(backends, site):
    site.engine.says("h")

    @rt.function
    def ask(s):
        s += "a" + rt.gen("x")

    await asyncio.to_thread(backends[0].server_info)  # leaves a connection open for the next
    read, write = os.pipe()

    def forked() -> str:
        if (child := os.fork()) == 0:
            try:
                os.close(read)
                model = backends[0].server_info()["model"]
                os.write(write, f"{model} {ask.run(backend=backends[0])['x']}".encode())
            except BaseException as error:
                os.write(write, repr(error).encode()[:500])
            finally:
                os._exit(0)
        os.close(write)
        text = os.read(read, 1000).decode()
        os.waitpid(child, 0)
        return text

    assert await asyncio.to_thread(forked) == "fake h"
    assert (await asyncio.to_thread(run, ask, backends[0]))["x"] == "h"


async def test_compiled_programs_and_batches(backends):
    compiled = tips.compile()
    rows = [{"topic": f"t{number}"} for number in range(12)]

    def batch(backend: Any) -> list[Any]:
        states = compiled.run_batch(rows, backend=backend)
        return [(state["tip"], state["best"], state["why"]) for state in states]

    http, zmq = [await asyncio.to_thread(batch, backend) for backend in backends]
    assert http == zmq


async def test_text_comes_in_pieces(backends, site):
    site.engine.next_token = lambda tokens: 97

    @rt.function
    def ask(s):
        s += "Go: " + rt.gen("x", max_tokens=40)

    def pieces(backend: Any) -> list[str]:
        return list(ask.run(backend=backend, stream=True).text_iter("x"))

    for backend in backends:
        found = await asyncio.to_thread(pieces, backend)
        assert "".join(found) == "a" * 40
        assert len(found) > 1


async def test_a_slow_function_keeps_its_lease(backends, site, monkeypatch):
    site.engine.says("h")

    @rt.function
    def slow(s):
        s += "a" + rt.gen("x", max_tokens=4)
        s.sync()
        threading.Event().wait(0.8)
        s += "b" + rt.gen("y", max_tokens=4)

    kept = http_programs.HttpSession._body
    monkeypatch.setattr(
        http_programs.HttpSession, "_body", lambda self: {**kept(self), "lease": 0.3}
    )
    state = await asyncio.to_thread(run, slow, backends[0])
    assert (state["x"], state["y"]) == ("h", "h")


async def test_errors_are_those_of_the_other_path(backends, site):
    @rt.function
    def wrong(s):
        s += "a" * 600 + rt.gen("x")

    @rt.function
    def unknown(s):
        s += rt.gen("x", max_tokens=2)
        s += s.ref("nothing")

    for backend in backends:
        with pytest.raises(rt.ContextLengthError, match="512"):
            (await asyncio.to_thread(run, wrong, backend))["x"]
        with pytest.raises(rt.ProgramError, match="nothing"):
            (await asyncio.to_thread(run, unknown, backend))["y"]
    site.engine.die()
    with pytest.raises(rt.BackendError):
        (await asyncio.to_thread(run, tips, backends[0], topic="x"))["why"]


@pytest.mark.parametrize("how", ["cancel", "timeout"])
async def test_what_is_given_up_is_aborted(backends, site, how):
    site.engine.idle = True

    @rt.function
    def ask(s):
        s += "a" + rt.gen("x", max_tokens=400)

    def go() -> Any:
        state = ask.run(backend=backends[0], stream=True, timeout=0.3 if how == "timeout" else None)
        if how == "cancel":
            deadline = threading.Event()
            while not site.engine.running:
                deadline.wait(0.01)
            state.cancel()
        with pytest.raises(rt.BackendError):
            _ = state["x"]

    await asyncio.to_thread(go)
    await site.idle()
    assert site.engine.aborted


async def test_generating_without_the_language(backends, site):
    asked = {"sampling_params": {"max_new_tokens": 6, "temperature": 0}, "return_logprob": True}
    for prompt in ({"prompt": "ab"}, {"prompt": ["ab", "cd"]}, {"input_ids": [97, 98]}):
        http, zmq = [
            await asyncio.to_thread(lambda b=b, p=prompt: b.generate(**p, **asked))
            for b in backends
        ]
        for one, other in zip(*[x if isinstance(x, list) else [x] for x in (http, zmq)]):
            assert (one["text"], one["output_ids"]) == (other["text"], other["output_ids"])
            names = ("finish_reason", "prompt_tokens", "completion_tokens")
            assert [one["meta_info"][n] for n in names] == [other["meta_info"][n] for n in names]
            entries = [
                [(token, text) for _, token, text in reply["meta_info"]["output_token_logprobs"]]
                for reply in (one, other)
            ]
            assert entries[0] == entries[1]

    def streamed(backend: Any) -> list[Any]:
        two = {"sampling_params": {"max_new_tokens": 6, "seed": 3, "n": 2}, "stream": True}
        last: dict[int, Any] = {}
        for reply in backend.generate("ab", **two):
            known = last.get(reply["index"], {"text": ""})
            assert reply["text"].startswith(known["text"])
            last[reply["index"]] = reply
        return [(last[i]["text"], last[i]["output_ids"]) for i in (0, 1)]

    assert await asyncio.to_thread(streamed, backends[0]) == await asyncio.to_thread(
        streamed, backends[1]
    )
    reply = await backends[0].async_generate("ab", **asked)
    assert reply["meta_info"]["completion_tokens"] <= 6


async def test_an_abort_by_id(backends, site):
    site.engine.idle = True

    def go() -> None:
        with pytest.raises(rt.BackendError, match="aborted"):
            backends[0].generate("ab", rid="mine")

    waiting = asyncio.create_task(asyncio.to_thread(go))
    await site.world.settle(lambda: bool(site.engine.running))
    backends[0].abort("mine")
    await waiting


async def test_what_the_backend_says(backends):
    http = backends[0]
    assert (http.model, http.context_length) == ("fake", 512)
    info = await asyncio.to_thread(http.server_info)
    assert info["model"] == "fake"
    await asyncio.to_thread(http.flush_cache)
    await asyncio.to_thread(http.shutdown)
    with pytest.raises(rt.BackendError, match="shut down"):
        http.generate("a")
    with pytest.raises(rt.BackendError, match="shut down"):
        tips.run(backend=http, topic="x")


async def test_which_server_is_asked_in_which_way(site, new_site):
    def made(url: str, **options: Any) -> str:
        backend = rt.RuntimeEndpoint(url, **options)
        backend.shutdown()
        return type(backend).__name__

    assert await asyncio.to_thread(made, site.url) == "HttpBackend"
    assert await asyncio.to_thread(made, site.url + "/") == "HttpBackend"
    assert await asyncio.to_thread(made, site.url + "/v1") == "OpenAI"
    assert await asyncio.to_thread(lambda: made(site.url, is_chat_model=True)) == "OpenAI"
    with pytest.raises(rt.BackendError, match="no answer"):
        await asyncio.to_thread(made, "http://127.0.0.1:9")

    async def other(reader: Any, writer: Any) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = json.dumps({"model_path": "m"}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(other, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    assert await asyncio.to_thread(made, f"http://127.0.0.1:{port}") == "OpenAI"
    server.close()


async def test_the_key_is_sent(new_site):
    site = await new_site(api_key="right")
    site.engine.says("h")

    @rt.function
    def ask(s):
        s += "a" + rt.gen("x")

    def go() -> str:
        with rt.RuntimeEndpoint(site.url, api_key="right") as backend:
            return ask.run(backend=backend)["x"]

    assert await asyncio.to_thread(go) == "h"
    with pytest.raises(rt.BackendError, match="401"):
        await asyncio.to_thread(rt.RuntimeEndpoint, site.url)


async def test_an_abort_before_anything_was_sent_reaches_the_caller():
    told: list[Any] = []
    connection = HttpConnection(None)  # nothing is asked of it
    for _ in range(2):
        connection.requests["mine"] = told.append
        connection.send(Generate(rid="mine", prompt="ab", sampling={}))
        connection.send(AbortGenerate(rid="mine"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert [error.kind for error in told] == ["aborted", "aborted"]
    assert not connection.requests
