"""Short calls that go over lanes: who takes them, what ends them, what others see of them."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ramet as rt
import zmq
from ramet.backends import _loop, direct
from ramet.backends.remote import FEW, SHORT_BYTES, RemoteBackend
from ramet.runtime.protocol import ErrorInfo, FinishReason, MetaInfo
from ramet.runtime.protocol.codec import client_codec, gateway_codec
from ramet.runtime.protocol.lane import Lane, accept, lane_path, listen
from ramet.runtime.protocol.messages import (
    PROTOCOL_VERSION,
    AbortGenerate,
    Generate,
    Generated,
    GenerateFailed,
    Hello,
    ProgramEvents,
    Refused,
    Welcome,
)

WELCOME = Welcome(
    version=PROTOCOL_VERSION, server="fake", model="m", context_length=99, spin_seconds=1.0
)
PROBE = gateway_codec.encode(ProgramEvents(pid=-1, events=b"\x90"))  # type: ignore[arg-type]


class Server:
    """A gateway with lanes that echoes. ``by_socket`` is what came over the connection (the socket
    or the first lane), ``by_lane`` what came over the lanes of callers, ``lanes``."""

    def __init__(self, address: str, lanes: bool = True, refuse: bool = False) -> None:
        self.address = address
        self.refuse = refuse
        self.by_lane: list[Any] = []
        self.by_socket: list[Any] = []
        self.lanes: list[Lane] = []
        self._firsts: list[Lane] = []
        self._listener = listen(lane_path(address) or "") if lanes else None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join(5)

    def _serve(self) -> None:
        while not self._stop.is_set():
            if self._socket.poll(2):
                peer, *messages = self._socket.recv_multipart()
                for message in map(client_codec.decode, messages):
                    self.by_socket.append(message)
                    for reply in self._replies(message):
                        self._socket.send_multipart([peer, gateway_codec.encode(reply)])
            while self._listener and (lane := accept(self._listener, 1 << 26)) is not None:
                (self.lanes if self._firsts else self._firsts).append(lane)
            for lane in [*self._firsts, *self.lanes]:
                first = lane in self._firsts
                try:
                    for message in map(client_codec.decode, lane.receive()):
                        (self.by_socket if first else self.by_lane).append(message)
                        replies = list(self._replies(message, over_lane=True))
                        lane.send([PROBE, *map(gateway_codec.encode, replies)])
                except ConnectionError:
                    (self._firsts if first else self.lanes).remove(lane)
                    lane.close()
        for lane in [*self._firsts, *self.lanes]:
            lane.close()
        if self._listener:
            self._listener.close()
        self._socket.close(0)
        self._context.term()

    def _replies(self, message: Any, over_lane: bool = False):
        if isinstance(message, Hello):
            refused = Refused(error=ErrorInfo("backend", "no"))
            yield refused if self.refuse and over_lane else WELCOME
        elif isinstance(message, AbortGenerate):
            yield GenerateFailed(rid=message.rid, error=ErrorInfo("aborted", "aborted"))
        elif isinstance(message, Generate) and message.prompt == "long":
            yield GenerateFailed(rid=message.rid, error=ErrorInfo("context_length", "99 fit"))
        elif isinstance(message, Generate) and message.prompt == "refused":
            yield Refused(error=ErrorInfo("backend", "what a message"))
        elif isinstance(message, Generate) and message.prompt != "hang":
            text = message.prompt or f"{len(message.input_ids or b'') // 4}"
            meta = MetaInfo(id=message.rid, finish_reason=FinishReason("stop"))
            yield Generated(rid=message.rid, texts=[text], output_ids=[[1]], metas=[meta])


@pytest.fixture
def start(tmp_path: Path):
    started: list[Server] = []

    def make(name: str = "g", **options: Any) -> Server:
        started.append(Server(f"ipc://{tmp_path}/{name}", **options))
        return started[-1]

    yield make
    for server in started:
        server.stop()


def until(check, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def asked(messages: list[Any]) -> list[Any]:
    return [message for message in messages if isinstance(message, Generate)]


def test_a_short_call_goes_over_a_lane_and_the_lane_is_kept(start):
    server = start()
    with RemoteBackend(server.address) as remote:
        assert remote.generate("one")["text"] == "one"
        assert [r["text"] for r in remote.generate(["a", "b", "c"])] == ["a", "b", "c"]
        assert remote.generate(input_ids=[5, 6])["text"] == "2"
        assert len(asked(server.by_lane)) == 5
        assert not asked(server.by_socket)
        assert len(server.lanes) == 1
    until(lambda: not server.lanes)


def test_what_is_long_or_many_or_streams_goes_over_the_connection(start):
    server = start()
    with RemoteBackend(server.address) as remote:
        remote.generate(["a"] * (FEW + 1))
        remote.generate(input_ids=[1] * (SHORT_BYTES // 4 + 1))
        list(remote.generate("a", stream=True))
        assert len(asked(server.by_socket)) == FEW + 3
        assert not server.by_lane
        hellos = sum(isinstance(message, Hello) for message in server.by_socket)
        assert hellos == 2, "the connection has a lane too"


@pytest.mark.parametrize("options", [{"lanes": False}, {"refuse": True}])
def test_without_a_lane_the_socket_does(start, options):
    server = start(**options)
    with RemoteBackend(server.address) as remote:
        for _ in range(3):
            assert remote.generate("one")["text"] == "one"
    assert len(asked(server.by_socket)) == 3
    hellos = [*server.by_lane, *server.by_socket]
    assert sum(isinstance(message, Hello) for message in hellos) <= 3, "each asks but once"


def test_callers_at_a_time_have_a_lane_each(start):
    server = start()
    with RemoteBackend(server.address) as remote:
        got: list[str] = []
        threads = [
            threading.Thread(target=lambda i=i: got.append(remote.generate(f"{i}")["text"]))
            for i in range(40)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert sorted(got, key=int) == [f"{i}" for i in range(40)]
        until(lambda: len(server.lanes) <= direct.DirectLines.MOST_KEPT)


def test_errors_are_raised_and_the_next_call_goes_on(start):
    server = start()
    with RemoteBackend(server.address) as remote:
        for _ in range(2):
            with pytest.raises(rt.ContextLengthError, match="99 fit"):
                remote.generate(["fine", "long"])
            with pytest.raises(rt.BackendError, match="what a message"):
                remote.generate("refused")
            with pytest.raises(rt.BadInputError):
                remote.generate("half \ud800")
            assert remote.generate("fine")["text"] == "fine"


def test_a_request_is_aborted_by_its_id_alone(start):
    server = start()
    with RemoteBackend(server.address) as remote:
        caught: list[BaseException] = []

        def work() -> None:
            try:
                remote.generate("hang", rid="mine")
            except BaseException as error:
                caught.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        until(lambda: asked(server.by_lane))
        with pytest.raises(rt.BadInputError, match="in use"):
            remote.generate("a", rid="mine")
        with pytest.raises(rt.BadInputError, match="in use"):
            remote.generate(["a"] * FEW * 2, rid=["mine", *map(str, range(FEW * 2 - 1))])
        remote.abort("other")
        assert thread.is_alive()
        remote.abort("mine")
        thread.join(5)
        assert isinstance(caught[0], rt.AbortedError)
        assert remote.generate("a", rid="mine")["text"] == "a"
        assert not remote.connection().requests
        assert not remote.connection().lines.running


def test_an_interrupted_call_hangs_up(start):
    server = start()
    with RemoteBackend(server.address) as remote:
        assert remote.generate("a")["text"] == "a"

        held = list(remote.connection().lines._free)  # or its end as garbage would hang up
        assert len(held) == 1

        def interrupt() -> None:
            until(lambda: len(asked(server.by_lane)) == 2)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            remote.generate("hang")
        thread.join(5)
        until(lambda: not server.lanes)  # by which the gateway knows
        assert remote.generate("b")["text"] == "b"


def test_an_interrupt_before_it_is_sent_leaves_its_id_free(start):
    server = start()

    class Interrupted(dict[str, Any]):
        def setdefault(self, rid: str, tell: Any = None, /) -> Any:
            super().setdefault(rid, tell)
            raise KeyboardInterrupt

    with RemoteBackend(server.address) as remote:
        connection = remote.connection()
        connection.requests = Interrupted()
        with pytest.raises(KeyboardInterrupt):
            remote.generate("a", rid="mine")
        assert not connection.requests
        connection.requests = {}
        assert remote.generate("a", rid="mine")["text"] == "a"
        assert not connection.requests
        assert not connection.lines.running


@pytest.mark.parametrize("how", ["server", "backend"])
def test_whoever_waits_hears_that_it_is_over(start, how):
    server = start()
    remote = RemoteBackend(server.address)
    caught: list[BaseException] = []

    def work() -> None:
        try:
            remote.generate("hang")
        except BaseException as error:
            caught.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: len(asked(server.by_lane)) == 3)
    began = time.monotonic()
    server.stop() if how == "server" else remote.shutdown()
    for thread in threads:
        thread.join(5)
    assert time.monotonic() - began < 3.0
    assert len(caught) == 3
    match = "gone" if how == "server" else "shut down"
    assert all(isinstance(e, rt.BackendError) and match in str(e) for e in caught)
    remote.shutdown()


def test_a_server_that_comes_back_is_used_again(start):
    server = start()
    remote = RemoteBackend(server.address)
    assert remote.generate("a")["text"] == "a"
    server.stop()
    until(lambda: remote._connection is not None and remote._connection.lost is not None)
    again = start()
    assert remote.generate("b")["text"] == "b"
    assert len(asked(again.by_lane)) == 1
    remote.shutdown()


def test_a_fork_leaves_its_parents_lanes_alone(start):
    server = start()
    with RemoteBackend(server.address) as remote:
        assert remote.generate("a")["text"] == "a"
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = 0 if remote.generate("child")["text"] == "child" else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert remote.generate("b")["text"] == "b"


def test_a_call_that_outlives_its_backend_leaves_no_lane_open(start):
    server = start()
    remote = RemoteBackend(server.address)
    connection = remote.connection()
    line = connection.lines.take()
    assert line is not None
    remote.shutdown()
    until(lambda: connection.lost is not None)
    connection.lines.give(line)
    until(lambda: not server.lanes)
    assert line._lane.fileno() < 0


def test_a_backend_that_nobody_holds_is_closed_when_its_stream_has_ended(start):
    server = start()
    remote = RemoteBackend(server.address)
    connection = remote.connection()
    assert remote.generate("a")["text"] == "a"
    stream = remote.generate("hang", stream=True)
    until(lambda: len(asked(server.by_socket)) == 1)
    del remote
    gc.collect()
    time.sleep(0.1)
    assert connection.lost is None, "somebody reads"
    assert iter(stream) is stream
    _loop.soon(connection.requests.clear)
    until(lambda: connection.lost is not None)
    until(lambda: not server.lanes and not server._firsts)


def test_requests_come_and_go_while_all_of_them_are_refused(start):
    """The connection looks through them in its own thread."""
    server = start()
    with RemoteBackend(server.address) as remote:
        connection = remote.connection()
        sent: list[Any] = []

        def send(message: Any) -> None:
            sent.append(message)
            connection.requests[f"new {len(sent)}"] = direct.elsewhere

        connection.requests.update({f"{i}": direct.elsewhere for i in range(3)})
        connection.send = send  # type: ignore[method-assign]
        connection._refused(ErrorInfo("backend", "no"))
        assert len(sent) == 3
        assert not connection.requests


def test_it_looks_again_and_again_only_where_there_are_cores(start, monkeypatch):
    server = start()
    looks = 0

    class Counting(direct.Direct):
        def _receive(self, wait_ms: int) -> list[bytes]:
            nonlocal looks
            looks += wait_ms == 0
            return super()._receive(wait_ms)

    monkeypatch.setattr(direct, "Direct", Counting)
    with RemoteBackend(server.address) as remote:
        monkeypatch.setattr(direct, "spin_seconds", lambda: 0.0)
        remote.generate("a")
        assert looks == 0
        monkeypatch.setattr(direct, "spin_seconds", lambda: 5.0)
        remote.generate("a")
        assert looks > 0
        looks = 0
        monkeypatch.setattr(remote.connection().lines._free[0], "_spin", 0.0)
        remote.generate("a")
        assert looks == 0, "the server needs its cores"
