"""What a broken or hostile peer sends over ZMQ is refused; everybody else goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import ramet as rt
import zmq
from ramet.runtime.protocol.codec import client_codec, gateway_codec
from ramet.runtime.protocol.messages import (
    PROTOCOL_VERSION,
    AppendProgram,
    ControlReply,
    Generate,
    Generated,
    GenerateFailed,
    Hello,
    OpenProgram,
    ProgramEvents,
    Refused,
    Welcome,
)

ONE = {"temperature": 0.0, "max_new_tokens": 1}
MEGABYTE = 1 << 20


class Peer:
    """A bare socket at the runtime's door."""

    def __init__(self, address: str) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)

    def send(self, *frames: Any) -> None:
        self.socket.send_multipart(
            [frame if isinstance(frame, bytes) else client_codec.encode(frame) for frame in frames]
        )

    def receive(self, seconds: float = 10.0) -> Any:
        """The next message that is no empty list of events; None when none comes."""
        while self.socket.poll(int(seconds * 1000)):
            message = gateway_codec.decode(self.socket.recv())
            if isinstance(message, ProgramEvents) and not msgspec.msgpack.decode(message.events):
                continue
            return message
        return None

    def hello(self, version: int = PROTOCOL_VERSION) -> Any:
        self.send(Hello(version=version, client="a test"))
        return self.receive()


@pytest.fixture
def connect(runtime: Any) -> Iterator[Callable[[], Peer]]:
    """Makes peers. Afterwards the runtime answers well-behaved clients, and has lost nothing."""
    peers: list[Peer] = []

    def make() -> Peer:
        peers.append(Peer(runtime.address))
        return peers[-1]

    yield make
    for peer in peers:
        peer.socket.close(0)
    reply = runtime.generate("The capital of France is", sampling_params=ONE)
    assert reply["text"] == " Paris"


MALFORMED = {
    "nothing": b"",
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "noise": bytes(range(256)) * 8,
    "no message": msgspec.msgpack.encode([1, 2, 3]),
    "no tag": msgspec.msgpack.encode({"rid": "x"}),
    "unknown tag": msgspec.msgpack.encode({"type": "format_disk"}),
    "missing field": msgspec.msgpack.encode({"type": "generate"}),
    "wrong type": msgspec.msgpack.encode({"type": "generate", "rid": 5, "prompt": "a"}),
    "cut short": client_codec.encode(Generate(rid="x", prompt="a" * 50))[:30],
    "a pickle": b"\x80\x04\x95\x1e\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system",
    "deep": b"\x91" * 100_000 + b"\x90",
}


@pytest.mark.parametrize("data", list(MALFORMED.values()), ids=list(MALFORMED))
@pytest.mark.parametrize("greeted", [True, False], ids=["after hello", "at once"])
def test_malformed_messages(connect: Callable[[], Peer], data: bytes, greeted: bool) -> None:
    peer = connect()
    if greeted:
        assert isinstance(peer.hello(), Welcome)
    peer.send(data)
    reply = peer.receive()
    assert isinstance(reply, Refused), reply
    assert reply.error.message
    assert isinstance(peer.hello(), Welcome), "the connection did not live on"


def test_wrong_protocol_version(connect: Callable[[], Peer]) -> None:
    peer = connect()
    reply = peer.hello(version=PROTOCOL_VERSION + 1)
    assert isinstance(reply, Refused)
    assert str(PROTOCOL_VERSION) in reply.error.message
    assert str(PROTOCOL_VERSION + 1) in reply.error.message
    peer.send(Generate(rid="x", prompt="a", sampling=ONE))
    assert isinstance(peer.receive(), Refused), "served without a welcome"
    assert isinstance(peer.hello(), Welcome)


def test_work_before_hello(connect: Callable[[], Peer]) -> None:
    peer = connect()
    peer.send(Generate(rid="x", prompt="a", sampling=ONE))
    reply = peer.receive()
    assert isinstance(reply, Refused)
    assert "hello" in reply.error.message


def test_a_bad_frame_costs_its_neighbours_nothing(connect: Callable[[], Peer]) -> None:
    """Messages may travel as frames of one; each is taken, or refused, by itself."""
    peer = connect()
    peer.hello()
    ask = Generate(rid="x", prompt="The capital of France is", sampling=ONE)
    peer.send(b"more", ask, b"\xc1")
    replies = [peer.receive(30) for _ in range(3)]
    assert [type(reply) for reply in replies] == [Refused, Refused, Generated]
    assert replies[2].texts == [" Paris"]


def test_oversized_messages(connect: Callable[[], Peer], runtime: Any) -> None:
    """Over the limit: refused. Far over it: not even taken in."""
    peer = connect()
    peer.hello()
    peer.send(b"\xc1" * (65 * MEGABYTE))
    reply = peer.receive(30)
    assert isinstance(reply, Refused)
    assert "limit" in reply.error.message
    assert isinstance(peer.hello(), Welcome)

    peer = connect()
    peer.hello()
    peer.send(b"\xc1" * (200 * MEGABYTE))
    assert not isinstance(peer.receive(2), Welcome)
    assert runtime.server_info()["requests"]["running"] == 0


def test_the_client_does_not_send_what_is_too_large(runtime: Any) -> None:
    text = "x" * (65 * MEGABYTE)
    with pytest.raises(rt.BackendError, match="too large"):
        runtime.generate(text, sampling_params=ONE)

    @rt.function
    def huge(s: Any) -> None:
        s += text
        s += rt.gen("x", max_tokens=1)

    state = huge.run(backend=runtime)
    with pytest.raises(rt.RametError):
        _ = state["x"]
    assert runtime.generate("The capital of France is", sampling_params=ONE)["text"] == " Paris"


PROGRAMS = {
    "no program": msgspec.msgpack.encode(5),
    "unknown instruction": msgspec.msgpack.encode({"instructions": [{"type": "exec", "op": 1}]}),
    "wrong types": msgspec.msgpack.encode({"instructions": [{"type": "text", "parts": 5}]}),
    "unknown stream": msgspec.msgpack.encode(
        {"instructions": [{"type": "text", "stream": 77, "op": 1, "parts": ["a"]}]}
    ),
    "unknown value": msgspec.msgpack.encode(
        {
            "instructions": [
                {
                    "type": "text",
                    "op": 1,
                    "parts": [{"type": "ref", "stream": 0, "name": "ghost"}],
                }
            ]
        }
    ),
    "bad sampling": msgspec.msgpack.encode(
        {"instructions": [{"type": "gen", "op": 1, "name": "x", "sampling": {"top_p": 9}}]}
    ),
}


@pytest.mark.parametrize("program", list(PROGRAMS.values()), ids=list(PROGRAMS))
def test_malformed_programs_end_with_an_error(connect: Callable[[], Peer], program: bytes) -> None:
    peer = connect()
    peer.hello()
    peer.send(OpenProgram(pid=1, program=msgspec.Raw(program), closed=True))
    events: list[Any] = []
    while not any(event["type"] == "done" for event in events):
        message = peer.receive()
        assert message is not None, f"the program never ended: {events}"
        if isinstance(message, Refused):
            return
        events += msgspec.msgpack.decode(message.events)
    assert any(event.get("error") for event in events), events


def test_messages_for_programs_that_do_not_exist(connect: Callable[[], Peer]) -> None:
    peer = connect()
    peer.hello()
    peer.send(AppendProgram(pid=99, instructions=msgspec.Raw(msgspec.msgpack.encode([]))))
    peer.send(msgspec.msgpack.encode({"type": "cancel", "pid": 98}))
    peer.send(msgspec.msgpack.encode({"type": "abort", "rid": "97"}))
    peer.send(msgspec.msgpack.encode({"type": "control", "id": 1, "op": "server_info"}))
    reply = peer.receive()
    assert isinstance(reply, ControlReply)
    peer.send(msgspec.msgpack.encode({"type": "control", "id": 2, "op": "shutdown"}))
    assert isinstance(peer.receive(), Refused), "a client may not shut the server down"


def test_two_clients_use_the_same_names(connect: Callable[[], Peer]) -> None:
    """Request and program ids are a connection's own."""
    first, second = connect(), connect()
    for peer in (first, second):
        peer.hello()
    for peer, prompt in ((first, "The capital of France is"), (second, "Two plus two equals")):
        peer.send(Generate(rid="same", prompt=prompt, sampling=ONE))
    texts = [peer.receive().texts[0] for peer in (first, second)]
    assert texts == [" Paris", " five"]
    second.send(msgspec.msgpack.encode({"type": "abort", "rid": "same"}))
    first.send(Generate(rid="twice", prompt="a", sampling={**ONE, "max_new_tokens": 100}))
    first.send(Generate(rid="twice", prompt="a", sampling=ONE))
    reply = first.receive()
    assert isinstance(reply, GenerateFailed)
    assert "twice" in reply.error.message
    assert len(first.receive(60).output_ids[0]) > 1


def test_a_client_that_does_not_read_is_dropped_and_holds_nothing(
    connect: Callable[[], Peer], runtime: Any, settled: Any
) -> None:
    """Its socket is closed in the middle of a stream."""
    peer = connect()
    peer.hello()
    peer.send(
        Generate(
            rid="x",
            prompt="Once",
            sampling={"max_new_tokens": 4000, "ignore_eos": True},
            stream=True,
        )
    )
    assert peer.receive(30).texts
    assert runtime.server_info()["requests"]["running"] == 1
    peer.socket.close(0)
    settled(runtime, 10)
    deadline = time.monotonic() + 5
    while runtime.server_info()["clients"] > 1:
        assert time.monotonic() < deadline, "clients that are gone are still counted"
        time.sleep(0.1)
