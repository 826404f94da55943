from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ramet as rt
import zmq
import zmq.asyncio
from ramet.backends.remote import RemoteBackend
from ramet.runtime.program.instructions import Instruction, Program
from ramet.runtime.program.interpreter import Interpreter
from ramet.runtime.program.limits import Limits
from ramet.runtime.protocol import ErrorInfo, FinishReason, MetaInfo
from ramet.runtime.protocol.codec import client_codec, gateway_codec, raw
from ramet.runtime.protocol.messages import (
    PROTOCOL_VERSION,
    AbortGenerate,
    AppendProgram,
    CancelProgram,
    Control,
    ControlReply,
    Generate,
    Generated,
    GenerateFailed,
    Hello,
    OpenProgram,
    ProgramEvents,
    Refused,
    RegisterProgram,
    Welcome,
)


class Gateway:
    """Speaks the gateway's protocol in a thread; programs run over a script, `Generate` echoes."""

    def __init__(self, address: str, answers: dict[str, Any], **options: Any) -> None:
        self.address = address
        self.answers = answers
        self.options = options
        self.got: list[Any] = []
        self.programs: dict[int, Interpreter] = {}
        self.registered: dict[int, Program] = {}
        self.tasks: list[Any] = []
        self.script: Any = None
        self._up = threading.Event()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._up.wait(5)

    def stop(self) -> None:
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # another thread's stop has just closed it
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(5)

    async def _serve(self) -> None:
        self.script = rt.testing.ScriptedBackend(self.answers, delay=self.options.get("delay", 0))
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        context = zmq.asyncio.Context()
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(self.address)
        self._up.set()
        reading = asyncio.create_task(self._read())
        await self._stop.wait()
        reading.cancel()
        for program in self.programs.values():
            program.cancel()
        await asyncio.sleep(0)
        self.socket.close(0)
        context.term()

    async def _read(self) -> None:
        while True:
            peer, *messages = await self.socket.recv_multipart()
            for message in map(client_codec.decode, messages):
                self.got.append(message)
                for reply in self._replies(peer, message):
                    await self._send(peer, reply)

    async def _send(self, peer: bytes, reply: Any) -> None:
        await self.socket.send_multipart([peer, gateway_codec.encode(reply)])

    def _replies(self, peer: bytes, message: Any):
        if isinstance(message, Hello):
            if "refuse" in self.options:
                yield Refused(error=ErrorInfo("backend", self.options["refuse"]))
            elif not self.options.get("mute"):
                yield Welcome(version=PROTOCOL_VERSION, server="fake", model="m", context_length=99)
        elif isinstance(message, RegisterProgram):
            self.registered[message.key] = msgspec.msgpack.decode(message.program, type=Program)
        elif isinstance(message, OpenProgram):
            self._open(peer, message)
        elif isinstance(message, AppendProgram):
            more = msgspec.msgpack.decode(message.instructions, type=list[Instruction])
            self.programs[message.pid].feed(more, message.closed)
        elif isinstance(message, CancelProgram):
            self.programs[message.pid].cancel()
        elif isinstance(message, Control):
            if message.op == "flush_cache":
                yield ControlReply(id=message.id, error=ErrorInfo("backend", "requests run"))
            else:
                yield ControlReply(id=message.id, data={"model": "m"})
        elif isinstance(message, Generate):
            yield from self._generate(message)
        elif isinstance(message, AbortGenerate):
            yield GenerateFailed(rid=message.rid, error=ErrorInfo("aborted", "aborted"))

    def _open(self, peer: bytes, message: OpenProgram) -> None:
        def emit(events: list[Any]) -> None:
            reply = ProgramEvents(pid=message.pid, events=raw(events))
            self.tasks.append(asyncio.ensure_future(self._send(peer, reply)))

        if message.key is not None:
            program = self.registered[message.key]
        else:
            program = msgspec.msgpack.decode(message.program, type=Program)
        interpreter = Interpreter(
            self.script.executor,
            emit,
            program=message.pid,
            sampling=message.sampling,
            args=message.args,
            stream=message.stream,
            limits=Limits(),
        )
        self.programs[message.pid] = interpreter
        self.tasks.append(asyncio.ensure_future(interpreter.run()))
        interpreter.feed(program.instructions, message.closed)

    def _generate(self, message: Generate):
        if message.prompt == "hang":
            return
        if message.prompt == "long":
            error = ErrorInfo("context_length", "100 tokens; 99 fit", param="prompt")
            yield GenerateFailed(rid=message.rid, error=error)
            return
        ids = message.input_ids
        if isinstance(ids, bytes):
            ids = list(struct.unpack(f"<{len(ids) // 4}i", ids))
        text = message.prompt if message.prompt is not None else f"{ids}"
        count = message.sampling.get("n", 1)

        def meta(ids: list[int], done: bool) -> MetaInfo:
            entries = (
                [(-0.5, i, "t") for i in ids] if message.sampling.get("return_logprob") else None
            )
            reason = FinishReason("stop") if done else None
            return MetaInfo(id=message.rid, output_token_logprobs=entries, finish_reason=reason)

        if message.stream:
            for i, char in enumerate(text):
                yield Generated(
                    rid=message.rid,
                    texts=[char] * count,
                    output_ids=[[i]] * count,
                    metas=[meta([i], False)] * count,
                    done=False,
                )
            rest, ids = "", []
        else:
            rest, ids = text, list(range(len(text)))
        all_ids = list(range(len(text)))
        yield Generated(
            rid=message.rid,
            texts=[rest] * count,
            output_ids=[ids] * count,
            metas=[meta(all_ids, True)] * count,
        )


@pytest.fixture
def gateway(tmp_path: Path):
    """Starts gateways; stops them all at the end."""
    started: list[Gateway] = []

    def start(answers: dict[str, Any] | None = None, name: str = "g", **options: Any) -> Gateway:
        started.append(Gateway(f"ipc://{tmp_path}/{name}", answers or {}, **options))
        return started[-1]

    yield start
    for gateway in started:
        gateway.stop()


@rt.function
def tips(s, topic):
    s += rt.user(f"about {topic}")
    forks = s.fork(3)
    forks += lambda i: rt.assistant(f"{i} " + rt.gen("tip"))
    forks.join()
    s += rt.assistant(", ".join(s["tip"]) + rt.gen("end"))


ANSWERS = {"tip": lambda prompt: f"tip{prompt[-2]}", "end": "."}


def test_programs_run_there_as_here(gateway):
    remote = RemoteBackend(gateway(ANSWERS).address)
    here = rt.testing.ScriptedBackend(ANSWERS)
    assert (remote.model, remote.context_length) == ("m", 99)
    one, other = tips.run("x", backend=remote), tips.run("x", backend=here)
    assert one.text() == other.text()
    assert one.messages() == other.messages()
    assert one["tip"] == ["tip0", "tip1", "tip2"]
    state = tips.run("x", backend=remote, stream=True)
    assert "".join(state.text_iter()) == one.text()
    remote.shutdown()


def test_compiled_programs_are_sent_once(gateway):
    server = gateway(ANSWERS)
    remote = RemoteBackend(server.address)
    states = tips.compile().run_batch([(f"w{i}",) for i in range(12)], backend=remote)
    assert [s.messages()[0]["content"] for s in states] == [f"about w{i}" for i in range(12)]
    kinds = [type(message).__name__ for message in server.got]
    assert kinds.count("RegisterProgram") == 1
    assert kinds.count("OpenProgram") == 12
    assert all(not bytes(m.program) for m in server.got if isinstance(m, OpenProgram))
    remote.shutdown()


def test_a_lazy_program_opens_and_appends(gateway):
    @rt.function
    def f(s):
        s += "a" + rt.gen("end")
        assert s["end"] == "."
        s += "b"

    server = gateway(ANSWERS)
    with RemoteBackend(server.address) as remote:
        assert f.run(backend=remote, temperature=0.5).text() == "a.b"
    kinds = [type(message).__name__ for message in server.got]
    assert kinds == ["Hello", "OpenProgram", "AppendProgram"]
    assert server.got[1].sampling == {"temperature": 0.5}
    assert server.got[2].closed


def test_many_threads_share_a_connection(gateway):
    with RemoteBackend(gateway(ANSWERS).address) as remote:
        states = tips.run_batch([(f"w{i}",) for i in range(50)], backend=remote)
        assert all(state["end"] == "." for state in states)


def test_errors_cross_with_their_kind_and_line(gateway):
    @rt.function
    def f(s):
        s += rt.gen("x")

    with RemoteBackend(gateway({"x": rt.ContextLengthError("too long")}).address) as remote:
        state = f.run(backend=remote)
        with pytest.raises(rt.ContextLengthError, match=r"too long \(at test_remote\.py:\d+\)"):
            state["x"]


def test_nobody_there(tmp_path):
    began = time.monotonic()
    with pytest.raises(rt.BackendError, match=r"no ramet server answers at ipc://.*0\.3 s"):
        RemoteBackend(f"ipc://{tmp_path}/none", timeout=0.3)
    assert time.monotonic() - began < 3
    with pytest.raises(rt.BackendError, match="cannot connect"):
        RemoteBackend("nonsense://x")
    with pytest.raises(rt.BackendError, match="7411"):
        rt.RuntimeEndpoint("tcp://127.0.0.1", timeout=0.2)


def test_a_refusal_is_raised(gateway):
    server = gateway(refuse="the client speaks version 1, this server speaks version 9")
    with pytest.raises(rt.BackendError, match="version 1, this server speaks version 9"):
        RemoteBackend(server.address)


def test_a_refused_message_fails_and_aborts_what_waits(gateway):
    server = gateway({"x": "1"}, delay=60)
    replies = server._replies

    def refuse(peer, message):
        yield from replies(peer, message)
        if isinstance(message, OpenProgram):
            yield Refused(error=ErrorInfo("backend", "not that"))

    server._replies = refuse

    @rt.function
    def f(s):
        s += rt.gen("x")

    with RemoteBackend(server.address) as remote:
        state = f.run(backend=remote, stream=True)
        with pytest.raises(rt.BackendError, match="refused: not that"):
            state["x"]
        deadline = time.monotonic() + 5
        while not any(isinstance(message, CancelProgram) for message in server.got):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_lost_server_fails_every_reader(gateway):
    server = gateway({"x": "1"}, delay=60)

    @rt.function
    def f(s):
        s += rt.gen("x")

    remote = RemoteBackend(server.address)
    state = f.run(backend=remote, stream=True)
    threading.Timer(0.3, server.stop).start()
    began = time.monotonic()
    with pytest.raises(rt.BackendError, match="is gone"):
        state["x"]
    with pytest.raises(rt.BackendError, match="is gone"):
        list(state.text_iter())
    assert time.monotonic() - began < 5
    remote.shutdown()


def test_a_server_that_comes_back_is_used_again(gateway):
    server = gateway(ANSWERS)
    remote = RemoteBackend(server.address)
    assert tips.run("x", backend=remote)["end"] == "."
    server.stop()
    _until(lambda: remote._connection.lost is not None)
    gateway(ANSWERS)
    assert tips.run("x", backend=remote)["end"] == "."
    remote.shutdown()
    with pytest.raises(rt.BackendError, match="shut down"):
        tips.run("x", backend=remote)


HANGING = """
import sys, zmq
from ramet.runtime.protocol.codec import gateway_codec
from ramet.runtime.protocol.messages import Welcome
socket = zmq.Context().socket(zmq.ROUTER)
socket.bind(sys.argv[1])
print("up", flush=True)
while True:
    peer, *_ = socket.recv_multipart()
    socket.send_multipart([peer, gateway_codec.encode(
        Welcome(version=1, server="x", model="m", context_length=9))])
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_stuck_server_is_noticed_within_5_s(tmp_path, how):
    address = f"ipc://{tmp_path}/h"
    server = subprocess.Popen(
        [sys.executable, "-P", "-c", textwrap.dedent(HANGING), address], stdout=subprocess.PIPE
    )
    try:
        assert server.stdout is not None
        server.stdout.readline()
        remote = RemoteBackend(address)
        errors: list[tuple[float, BaseException]] = []

        def read(call) -> None:
            try:
                call()
            except BaseException as error:
                errors.append((time.monotonic(), error))

        @rt.function
        def f(s):
            s += rt.gen("x")
            s["x"]

        calls = [lambda: f.run(backend=remote), lambda: remote.generate("a"), remote.server_info]
        threads = [threading.Thread(target=read, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        began = time.monotonic()
        os.kill(server.pid, how)
        for thread in threads:
            thread.join(8)
        assert len(errors) == len(calls)
        for when, error in errors:
            assert isinstance(error, rt.BackendError)
            assert when - began < 5
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def test_cancelling_reaches_the_server(gateway):
    server = gateway({"x": "1"}, delay=60)

    @rt.function
    def f(s):
        s += rt.gen("x")

    with RemoteBackend(server.address) as remote:
        with pytest.raises(rt.BackendError, match=r"0\.2 s"):
            f.run(backend=remote, timeout=0.2)
        _until(lambda: any(isinstance(m, CancelProgram) for m in server.got))
        _until(lambda: server.script.open_contexts == 0)


def test_a_message_too_large_is_an_error_and_no_more(gateway, monkeypatch):
    from ramet.backends import connection

    monkeypatch.setattr(connection, "MAX_MESSAGE_BYTES", 2000)

    @rt.function
    def f(s, text):
        s += text + rt.gen("end")

    with RemoteBackend(gateway(ANSWERS).address) as remote:
        state = f.run("x" * 3000, backend=remote)
        with pytest.raises(rt.BackendError, match="too large"):
            state["end"]
        assert f.run("x", backend=remote)["end"] == "."
        with pytest.raises(rt.BackendError, match="too large"):
            remote.generate("x" * 3000)
        assert remote.generate("x")["text"] == "x"


# --- without the language ---


def test_generate_one_and_many(gateway):
    with RemoteBackend(gateway().address) as remote:
        reply = remote.generate("abc", sampling_params={"max_new_tokens": 4}, return_logprob=True)
        assert reply["text"] == "abc"
        assert reply["output_ids"] == [0, 1, 2]
        assert reply["meta_info"]["finish_reason"] == {"type": "stop"}
        assert len(reply["meta_info"]["output_token_logprobs"]) == 3
        assert [r["text"] for r in remote.generate(["a", "b"])] == ["a", "b"]
        assert remote.generate(input_ids=[1, 2])["text"] == "[1, 2]"
        assert [r["text"] for r in remote.generate(input_ids=[[1], [2]])] == ["[1]", "[2]"]
        assert len(remote.generate("a", sampling_params={"n": 3})) == 3
        assert len(remote.generate(["a", "b"], sampling_params={"n": 2})) == 4
        assert remote.generate([]) == []


def test_generate_streams_what_there_is_so_far(gateway):
    with RemoteBackend(gateway().address) as remote:
        steps = list(remote.generate("abc", stream=True, return_logprob=True))
        assert [s["text"] for s in steps] == ["a", "ab", "abc", "abc"]
        assert [s["output_ids"] for s in steps] == [[0], [0, 1], [0, 1, 2], [0, 1, 2]]
        counts = [len(s["meta_info"]["output_token_logprobs"]) for s in steps]
        assert counts == [1, 2, 3, 3]
        assert steps[-1]["meta_info"]["finish_reason"] == {"type": "stop"}
        assert "finish_reason" not in steps[0]["meta_info"]
        last = {}
        for step in remote.generate(["ab", "cde"], stream=True):
            last[step["index"]] = step["text"]
        assert last == {0: "ab", 1: "cde"}


async def test_generate_async(gateway):
    with RemoteBackend(gateway().address) as remote:
        replies = await asyncio.gather(*(remote.async_generate(f"p{i}") for i in range(5)))
        assert [r["text"] for r in replies] == [f"p{i}" for i in range(5)]
        stream = await remote.async_generate("ab", stream=True)
        assert [s["text"] async for s in stream] == ["a", "ab", "ab"]


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "input_ids": [1]}, "prompt"),
        ({"prompt": ["a", 3]}, "prompt"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": ["a"]}, "input_ids"),
        ({"input_ids": 3}, "input_ids"),
        ({"prompt": "a", "sampling_params": {"temperature": -1}}, "temperature"),
        ({"prompt": "a", "sampling_params": {"tempo": 1}}, "tempo"),
        ({"prompt": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"prompt": ["a", "b"], "rid": "same"}, "rid"),
        ({"prompt": ["a", "b"], "rid": ["same", "same"]}, "rid"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "a", "sampling_params": 5}, "sampling_params"),
        ({"prompt": ["a"], "sampling_params": [5]}, "sampling_params"),
        ({"prompt": "a", "sampling_params": {"max_new_tokens": 10**30}}, "max_new_tokens"),
        ({"prompt": "a", "sampling_params": {"top_k": 2**70}}, "top_k"),
        ({"prompt": "a", "sampling_params": {"stop": "\ud83d"}}, "stop"),
        ({"prompt": "a", "rid": 5}, "rid"),
        ({"prompt": ["a"], "rid": [5]}, "rid"),
        ({"prompt": "a", "cache_salt": 5}, "cache_salt"),
        ({"prompt": "a", "stream": "yes"}, "stream"),
    ],
)
def test_bad_input_names_itself(gateway, kwargs, named):
    server = gateway()
    with RemoteBackend(server.address) as remote:
        with pytest.raises(rt.BadInputError) as caught:
            remote.generate(**kwargs)
        assert caught.value.param == named
        assert not any(isinstance(m, Generate) for m in server.got)


def test_a_rid_to_abort_is_a_string(gateway):
    with RemoteBackend(gateway().address) as remote, pytest.raises(rt.BadInputError, match="rid"):
        remote.abort(5)


def _half(s):
    s += "half \ud83d" + rt.gen("x")


def _half_sent_by_the_loop(s):
    s += "half \ud83d" + rt.gen("x")
    time.sleep(0.2)


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("body", [_half, _half_sent_by_the_loop])
def test_half_a_character_is_an_error_and_costs_others_nothing(gateway, body, compiles):
    """What no message can carry is refused here, whichever thread comes to send it."""
    with RemoteBackend(gateway().address) as remote:
        program = rt.function(body)
        with pytest.raises(rt.BadInputError, match="half a character"):
            (program.compile() if compiles else program).run(backend=remote, timeout=10)["x"]
        with pytest.raises(rt.BadInputError, match="half a character"):
            remote.generate("\ud83d")
        assert remote.generate("ab")["text"] == "ab"


def test_a_fork_of_the_process_connects_anew(gateway):
    """What the child does, its shutdown included, is no matter of the parent's connection."""
    code = (
        "import os, sys, ramet as rt\n"
        "remote = rt.RuntimeEndpoint(sys.argv[1])\n"
        "assert remote.generate('ab')['text'] == 'ab'\n"
        "for use in (True, False):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        said = [remote.generate(t)['text'] for t in ('cd', 'ef')] if use else 0\n"
        "        remote.shutdown()\n"
        "        os._exit(0 if said in (['cd', 'ef'], 0) else 1)\n"
        "    assert os.waitpid(pid, 0)[1] == 0\n"
        "    for text in ('gh', 'ij', 'kl'):\n"
        "        assert remote.generate(text)['text'] == text\n"
        "print('done')\n"
    )
    command = [sys.executable, "-P", "-c", code, gateway().address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.stdout == "done\n", done.stderr


def test_errors_of_generate(gateway):
    with RemoteBackend(gateway().address) as remote:
        with pytest.raises(rt.ContextLengthError, match="99 fit"):
            remote.generate("long")
        with pytest.raises(rt.ContextLengthError):
            remote.generate(["a", "long"])


def test_abort_ends_exactly_one(gateway):
    with RemoteBackend(gateway().address) as remote:
        caught: list[BaseException] = []

        def work() -> None:
            try:
                remote.generate("hang", rid="mine")
            except BaseException as error:
                caught.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        _until(lambda: "mine" in remote.connection().requests)
        with pytest.raises(rt.BadInputError, match="in use"):
            remote.generate("a", rid="mine")
        remote.abort("other")
        remote.abort("mine")
        thread.join(5)
        assert isinstance(caught[0], rt.AbortedError)


async def test_a_cancelled_generate_aborts(gateway):
    server = gateway()
    with RemoteBackend(server.address) as remote:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(remote.async_generate("hang"), 0.2)
        await asyncio.to_thread(
            _until, lambda: any(isinstance(m, AbortGenerate) for m in server.got)
        )


def test_a_stream_left_early_aborts(gateway):
    server = gateway()
    with RemoteBackend(server.address) as remote:
        stream = remote.generate(["ab", "hang"], stream=True)
        next(stream)
        stream.close()
        _until(lambda: any(isinstance(m, AbortGenerate) for m in server.got))


def test_controls(gateway):
    with RemoteBackend(gateway().address) as remote:
        assert remote.server_info() == {"model": "m"}
        assert rt.get_server_info(remote) == {"model": "m"}
        with pytest.raises(rt.BackendError, match="requests run"):
            rt.flush_cache(remote)
        with pytest.raises(rt.BackendError, match="tokenizer"):
            _ = remote.tokenizer


def _until(check, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.005)
