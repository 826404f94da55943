from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import ramet as rt
from ramet.backends import openai_http


class Stub:
    """An OpenAI-like server: answers in upper case what a prompt ends with, and misbehaves."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.failures: list[tuple[int, dict[str, str], str]] = []
        self.echo = True
        self.schema = True
        self.breaks = False
        self.delay = 0.0
        self.answer = lambda prompt: prompt.split()[-1].upper() if prompt.split() else ""

    def reply(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "stub-model"}, {"id": "other"}]}
        if path == "/v1/chat/completions":
            return self._chat(body)
        if path == "/v1/completions":
            return self._completion(body)
        return 404, {"error": {"message": f"no {path}"}}

    def _chat(self, body: dict[str, Any]) -> tuple[int, Any]:
        if "response_format" in body:
            if not self.schema:
                return 400, {"error": {"message": "response_format is not known"}}
            enum = body["response_format"]["json_schema"]["schema"]["properties"]["answer"]["enum"]
            text = json.dumps({"answer": enum[-1]})
        else:
            text = self.answer(body["messages"][-1]["content"])
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": text},
                "finish_reason": "stop",
                "logprobs": {
                    "content": [
                        {
                            "token": text,
                            "logprob": -0.5,
                            "top_logprobs": [{"token": text, "logprob": -0.5}],
                        }
                    ]
                }
                if body.get("logprobs")
                else None,
            }
            for i in range(body.get("n", 1))
        ]
        usage = {
            "prompt_tokens": 5,
            "completion_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        return 200, {"id": "c1", "choices": choices, "usage": usage}

    def _completion(self, body: dict[str, Any]) -> tuple[int, Any]:
        prompt = body["prompt"]
        if body.get("echo"):
            if not self.echo:
                return 400, {"error": {"message": "echo is not supported"}}
            tokens = re.findall(r"\s*\S+|\s+$", prompt)
            # Longer words are likelier; "good" is a likely word anywhere.
            values = [-1.0 / len(t) if "good" not in t else -0.01 for t in tokens]
            logprobs = {"tokens": tokens, "token_logprobs": [None, *values[1:]]}
            choice = {"index": 0, "text": prompt, "logprobs": logprobs, "finish_reason": "length"}
            return 200, {"choices": [choice]}
        reason = "length" if body.get("max_tokens") == 1 else "stop"
        choices = [
            {"index": i, "text": self.answer(prompt), "finish_reason": reason, "stop_reason": "."}
            for i in range(body.get("n", 1))
        ]
        return 200, {"id": "t1", "choices": choices, "usage": {"prompt_tokens": 4}}


def _handler(stub: Stub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self._answer({})

        def do_POST(self):
            self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def _answer(self, body: dict[str, Any]) -> None:
            stub.requests.append((self.path, body, dict(self.headers)))
            time.sleep(stub.delay)
            if stub.failures:
                status, headers, text = stub.failures.pop(0)
                if status == 0:
                    self.close_connection = True
                    self.connection.close()
                    return
                self._send(status, text.encode(), headers)
                return
            status, reply = stub.reply(self.path, body)
            if status == 200 and body.get("stream"):
                self._stream(reply)
            else:
                self._send(status, json.dumps(reply).encode(), {})

        def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _stream(self, reply: dict[str, Any]) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("connection", "close")
            self.end_headers()
            for choice in reply["choices"]:
                text = choice["message"]["content"] if "message" in choice else choice["text"]
                for char in text:
                    piece = {"delta": {"content": char}} if "message" in choice else {"text": char}
                    self._chunk({"id": "s", "choices": [{"index": choice["index"], **piece}]})
                end = {"index": choice["index"], "finish_reason": "stop", "delta": {}}
                if not stub.breaks:
                    self._chunk({"choices": [end]})
            self._chunk({"choices": [], "usage": reply["usage"]})
            self.wfile.write(b"data: [DONE]\n\n")
            self.close_connection = True

        def _chunk(self, data: dict[str, Any]) -> None:
            self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


class Server:
    def __init__(self, stub: Stub) -> None:
        self.stub = stub
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(stub))
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(Stub())
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture
def backend(server: Server, monkeypatch) -> Iterator[rt.OpenAI]:
    monkeypatch.setattr(openai_http, "FIRST_WAIT_SECONDS", 0.01)
    backend = rt.OpenAI("m", server.url + "/v1", "key", max_retries=2)
    yield backend
    backend.shutdown()


@rt.function
def talk(s, topic):
    s += rt.system("Be brief.")
    s += rt.user(f"about {topic}")
    s += rt.assistant(rt.gen("a", max_tokens=7, stop="."))
    forks = s.fork(2)
    for i, branch in enumerate(forks):
        branch += rt.user(f"more {i}") + rt.assistant(rt.gen("b"))
    forks.join()
    s += rt.user("choose") + rt.assistant(rt.select("c", ["no", "yes"]))


def test_a_program_with_roles_uses_the_chat(server, backend):
    state = talk.run("cats", backend=backend, temperature=0)
    assert state["a"] == "CATS"
    assert state["b"] == ["0", "1"]
    assert state["c"] == "yes"
    path, body, headers = server.stub.requests[0]
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer key"
    assert body == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "about cats"},
        ],
        "max_tokens": 7,
        "stop": ["."],
        "temperature": 0.0,
    }
    assert state.messages()[2] == {"role": "assistant", "content": "CATS"}
    assert state.text().startswith("SYSTEM: Be brief.\nUSER: about cats\nASSISTANT: CATS\n")
    meta = state.get_meta_info("a")
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (5, 2, 3)
    assert meta["finish_reason"]["type"] == "stop"


def test_compiled_and_lazy_ask_for_the_same(server, backend):
    talk.run("cats", backend=backend)
    lazy = sorted(json.dumps(body, sort_keys=True) for _, body, _ in server.stub.requests)
    server.stub.requests.clear()
    talk.compile().run("cats", backend=backend)
    assert sorted(json.dumps(b, sort_keys=True) for _, b, _ in server.stub.requests) == lazy


def test_loops_run_there_too(server, backend):
    @rt.function
    def count(s):
        def turn(s):
            s += rt.user("say " + s["n"]) + rt.assistant(rt.gen("a"))
            s.switch(s["a"], {"2": rt.user("stop") + rt.assistant(rt.gen("end"))})

        s.repeat(turn, 9, until=lambda s: rt.matches(s["a"], 2), count="n")

    whole = count.compile().run(backend=backend)
    assert (whole["a"], whole["end"], whole["n"]) == ("2", "STOP", "2")
    assert whole.messages() == count.run(backend=backend).messages()
    asked = [body["messages"] for _, body, _ in server.stub.requests]
    assert asked[:3] == asked[3:]
    assert [len(messages) for messages in asked[:3]] == [1, 3, 5]


def test_a_program_without_roles_uses_completions(server, backend):
    @rt.function
    def f(s):
        s += "say hi" + rt.gen("x", max_tokens=1) + " then" + rt.gen("y", top_k=5, seed=3)

    state = f.run(backend=backend)
    assert state.text() == "say hiHI thenTHEN"
    assert [body["prompt"] for _, body, _ in server.stub.requests] == ["say hi", "say hiHI then"]
    assert server.stub.requests[1][1]["max_tokens"] == 1024
    assert server.stub.requests[1][1]["top_k"] == 5
    assert server.stub.requests[1][1]["seed"] == 3
    assert "top_k" not in server.stub.requests[0][1]
    assert state.get_meta_info("x")["finish_reason"] == {"type": "length"}
    assert state.get_meta_info("y")["finish_reason"] == {"type": "stop", "matched": "."}


def test_samples_and_logprobs(server, backend):
    @rt.function
    def f(s):
        s += rt.user("hey you")
        s += rt.assistant(rt.gen("x", n=3, return_logprob=True, top_logprobs_num=1))

    state = f.run(backend=backend)
    assert state["x"] == ["YOU"] * 3
    meta = state.get_meta_info("x")[1]
    assert meta["output_token_logprobs"] == [(-0.5, -1, "YOU")]
    assert meta["output_top_logprobs"] == [[(-0.5, -1, "YOU")]]


def test_streaming(server, backend):
    @rt.function
    def f(s):
        s += rt.user("hey you") + rt.assistant(rt.gen("x"))

    state = f.run(backend=backend, stream=True)
    assert list(state.text_iter("x")) == ["Y", "O", "U"]
    assert "".join(state.text_iter()) == state.text() == "USER: hey you\nASSISTANT: YOU\n"
    assert state.get_meta_info("x")["completion_tokens"] == 2
    assert server.stub.requests[0][1]["stream_options"] == {"include_usage": True}


def test_a_stream_that_breaks_off_is_an_error(server, backend):
    server.stub.breaks = True

    @rt.function
    def f(s):
        s += rt.user("hey you") + rt.assistant(rt.gen("x"))

    state = f.run(backend=backend, stream=True)
    with pytest.raises(rt.BackendError, match="without a finish reason"):
        state["x"]


@pytest.mark.parametrize("method", [rt.token_length_normalized, rt.greedy_token_selection])
def test_select_scores_where_completions_echo(server, backend, method):
    @rt.function
    def f(s):
        s += "is it"
        s += rt.select("x", [" a", " good thing", " b"], choices_method=method)

    state = f.run(backend=backend)
    assert state["x"] == " good thing"
    assert all(body["echo"] for _, body, _ in server.stub.requests)
    meta = state.get_meta_info("x")
    assert meta["choices"] == [" a", " good thing", " b"]
    assert meta["normalized_prompt_logprobs"][0] == pytest.approx(-0.5)
    assert meta["input_token_logprobs"][1][0] == (-0.01, -1, " good")
    assert state.text() == "is it good thing"


def test_select_scores_a_merged_boundary(server, backend):
    """With T(text) = [is, it] and T(text + choice) = [is, itself], scoring starts at the second."""

    @rt.function
    def f(s):
        s += "is it" + rt.select("x", ["self", " a"])

    meta = f.run(backend=backend).get_meta_info("x")
    assert [entry[2] for entry in meta["input_token_logprobs"][0]] == [" itself"]
    assert [entry[2] for entry in meta["input_token_logprobs"][1]] == [" it", " a"]


def test_unconditional_select(server, backend):
    @rt.function
    def f(s):
        s += "it " + rt.select(
            "x", ["word", "good"], choices_method=rt.unconditional_likelihood_normalized
        )

    assert f.run(backend=backend)["x"] == "good"
    server.stub.echo = False
    fresh = rt.OpenAI("m", server.url + "/v1", max_retries=0)
    with pytest.raises(rt.ProgramError, match="needs log-probs"):
        f.run(backend=fresh)["x"]


def test_select_asks_where_nothing_echoes(server, backend):
    server.stub.echo = False
    server.stub.answer = lambda prompt: " yes, certainly"

    @rt.function
    def f(s):
        s += "is it" + rt.select("x", [" no", " yes"])
        s += rt.select("y", [" no", " yes"])

    state = f.run(backend=backend)
    assert state["x"] == state["y"] == " yes"
    echoes = [body for _, body, _ in server.stub.requests if body.get("echo")]
    assert len(echoes) == 1, "it is tried once"
    server.stub.answer = lambda prompt: "perhaps"
    with pytest.raises(rt.ProgramError, match=r"'perhaps'.*none of"):
        f.run(backend=backend)["x"]


def test_select_in_a_chat_without_schemas_asks_in_words(server, backend):
    server.stub.schema = False
    server.stub.answer = lambda prompt: '"no"'

    @rt.function
    def f(s):
        s += rt.user("is it?") + rt.assistant("I say " + rt.select("x", ["no", "yes"]))

    assert f.run(backend=backend)["x"] == "no"
    body = server.stub.requests[-1][1]
    assert body["messages"][-2] == {"role": "assistant", "content": "I say "}
    assert '["no", "yes"]' in body["messages"][-1]["content"]


def test_text_before_gen_in_an_assistant_message_is_continued(server, backend):
    @rt.function
    def f(s):
        s += rt.user("hi") + rt.assistant("Well then" + rt.gen("x"))

    assert f.run(backend=backend).text() == "USER: hi\nASSISTANT: Well thenTHEN\n"
    body = server.stub.requests[0][1]
    assert body["continue_final_message"] is True
    assert body["messages"][-1] == {"role": "assistant", "content": "Well then"}
    server.stub.failures = [
        (400, {}, '{"error": {"message": "unknown field continue_final_message"}}')
    ]
    with pytest.raises(rt.BadInputError, match="cannot continue a message"):
        f.run(backend=backend)["x"]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: "raw" + rt.user("q") + rt.assistant(rt.gen("x")), "outside of its messages"),
        (lambda: rt.user("q" + rt.gen("x")), "a user message"),
        (lambda: rt.user("q") + rt.gen("x"), "no message"),
    ],
)
def test_what_a_chat_cannot_do_is_said(server, backend, build, message):
    state = rt.function(lambda s: s.__iadd__(build())).run(backend=backend)
    with pytest.raises(rt.ProgramError, match=message):
        state["x"]
    assert server.stub.requests == []


def test_a_chat_model_takes_raw_text_as_a_user_message(server):
    backend = rt.OpenAI(None, server.url + "/v1", is_chat_model=True)
    state = rt.function(lambda s: s.__iadd__("one two" + rt.gen("x"))).run(backend=backend)
    assert state.text() == "one twoTWO"
    assert server.stub.requests[0][0] == "/v1/models"
    assert server.stub.requests[1][1]["model"] == "stub-model"
    assert server.stub.requests[1][1]["messages"] == [{"role": "user", "content": "one two"}]


@rt.function
def ask(s):
    s += "q w" + rt.gen("x")


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_may_pass_is_tried_again(server, backend, status):
    server.stub.failures = [(status, {"retry-after": "0"}, "busy"), (0, {}, "")]
    assert ask.run(backend=backend)["x"] == "W"
    assert len(server.stub.requests) == 3


def test_errors_name_url_and_status(server, backend):
    server.stub.failures = [(503, {}, "down")] * 3
    with pytest.raises(rt.BackendError, match=r"POST http://\S+/v1/completions: HTTP 503: down"):
        ask.run(backend=backend)["x"]
    server.stub.requests.clear()
    server.stub.failures = [(401, {}, '{"error": {"message": "bad key"}}')]
    with pytest.raises(rt.BackendError, match="HTTP 401: bad key"):
        ask.run(backend=backend)["x"]
    assert len(server.stub.requests) == 1, "a refusal is not tried again"
    server.stub.failures = [(400, {}, '{"error": {"code": "context_length_exceeded"}}')]
    with pytest.raises(rt.ContextLengthError, match="HTTP 400"):
        ask.run(backend=backend)["x"]
    server.stub.failures = [(200, {}, "<html>")]
    with pytest.raises(rt.BackendError, match="JSON"):
        ask.run(backend=backend)["x"]


def test_half_a_character_is_bad_input(server, backend):
    program = rt.function(lambda s: s.__iadd__("a\ud83d" + rt.gen("x")))
    with pytest.raises(rt.BadInputError, match="half a character"):
        program.run(backend=backend)["x"]
    assert not server.stub.requests


def test_nobody_there_is_an_error(monkeypatch):
    monkeypatch.setattr(openai_http, "FIRST_WAIT_SECONDS", 0.01)
    backend = rt.OpenAI("m", "http://127.0.0.1:9/v1", max_retries=1)
    with pytest.raises(rt.BackendError, match=r"127\.0\.0\.1:9.*after 2 tries"):
        ask.run(backend=backend)["x"]
    with pytest.raises(ValueError, match="base_url"):
        rt.OpenAI("m", "ftp://x")


def test_an_endpoint_by_http_is_this_backend(server):
    backend = rt.RuntimeEndpoint(server.url, "key")
    assert isinstance(backend, rt.OpenAI)
    assert ask.run(backend=backend)["x"] == "W"
    assert backend.server_info()["models"] == ["stub-model", "other"]
    with pytest.raises(rt.BackendError, match="flush_cache"):
        backend.flush_cache()
    with pytest.raises(ValueError, match="no endpoint"):
        rt.RuntimeEndpoint("gopher://x")


async def test_cancelling_drops_the_request(server, backend):
    server.stub.delay = 1.0
    task = asyncio.create_task(ask.arun(backend=backend))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    server.stub.delay = 0.0
    assert (await ask.arun(backend=backend))["x"] == "W"


def test_a_batch(server, backend):
    @rt.function
    def f(s, word):
        s += f"say {word}" + rt.gen("x")

    states = f.run_batch([(f"w{i}",) for i in range(30)], backend=backend, num_threads=8)
    assert [state["x"] for state in states] == [f"W{i}" for i in range(30)]


def test_a_schema_in_a_chat_is_a_response_format(server, backend):
    schema = {"type": "object", "properties": {"answer": {"enum": ["a", "b"]}}}

    @rt.function
    def ask(s):
        s += rt.user("Which?") + rt.assistant(rt.gen("x", json_schema=schema))

    state = ask.run(backend=backend)
    assert state.value("x") == {"answer": "b"}
    body = server.stub.requests[-1][1]
    assert body["response_format"]["json_schema"]["schema"] == schema


def test_other_constraints_are_asked_for_and_looked_after(server, backend):
    @rt.function
    def ask(s):
        s += rt.user("Which?") + rt.assistant(rt.gen("x", choices=["yes", "no"], constrained=True))

    state = ask.run(backend=backend)
    with pytest.raises(rt.GrammarError, match="did not keep to the choice"):
        state["x"]
    body = server.stub.requests[-1][1]
    assert body["structured_outputs"] == {"choice": ["yes", "no"]}
