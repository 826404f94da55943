"""The engine's side of its sockets: who is connected, what came in, what goes out."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import zmq

from ..memory.radix_tree import RadixTree
from ..protocol.awake import Patience
from ..protocol.codec import engine_codec, reply_codec
from ..protocol.errors import BackendError
from ..protocol.messages import Beat, EngineMessage, EngineReply
from ..scheduler.request import Request
from .handles import Handles
from .lanes import Lanes
from .outbox import Outbox

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
_MESSAGES_A_STEP = 1024


class Connection:
    """One gateway: its requests, its handles, and what it has not been told yet."""

    def __init__(self, identity: bytes, index: int, tree: RadixTree) -> None:
        self.identity = identity
        self.index = index
        self.requests: dict[int, Request] = {}
        self.handles = Handles(tree)
        self.outbox = Outbox()
        self.gone = False


class Connections:
    """A ROUTER socket, and the lanes beside it; a gateway's lane is a peer of its own. A peer that
    cannot be reached any more is reported by `lost`, never silently skipped. ``spin``: seconds
    after a message in which `receive` waits awake, as `Patience` has it."""

    def __init__(self, address: str, tree: RadixTree, *, spin: float = 0.0) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15000)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._lanes = Lanes(address, self._poller)  # first: who finds the socket looks for them
        self._socket.bind(address)
        self._tree = tree
        self._peers: dict[bytes, Connection] = {}
        self._next = 0
        self._beaten = 0.0
        self._patience = Patience(spin)
        self.lost: list[Connection] = []

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._peers.values()))

    def __getitem__(self, identity: bytes) -> Connection:
        return self._peers[identity]

    def get(self, identity: bytes) -> Connection | None:
        return self._peers.get(identity)

    def receive(self, wait: float) -> Iterator[tuple[Connection, EngineMessage]]:
        """Messages that are there, waiting up to ``wait`` seconds for the first. Malformed ones are
        logged and dropped: only our own gateway speaks here."""
        ready = self._await(wait)
        if not ready:
            return
        for identity, messages in self._lanes.receive(
            [at for at, _ in ready if at != self._socket]
        ):
            yield from self._decoded(identity, messages)
        for identity in self._lanes.gone:
            if (peer := self._peers.get(identity)) is not None:
                self._lose(peer)
        self._lanes.gone.clear()
        for _ in range(_MESSAGES_A_STEP):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield from self._decoded(frames[0], frames[1:])

    def _decoded(
        self, identity: bytes, messages: list[bytes]
    ) -> Iterator[tuple[Connection, EngineMessage]]:
        self._patience.heard()
        peer = self._peers.get(identity)
        if peer is None:
            self._next += 1
            peer = self._peers[identity] = Connection(identity, self._next, self._tree)
        for data in messages:
            try:
                message = engine_codec.decode(data)
            except BackendError as error:
                log.warning("dropped a message: %s", error)
                continue
            yield peer, message

    def _await(self, wait: float) -> list[tuple[Any, int]]:
        """What is ready, descriptors and the socket, within ``wait`` seconds."""
        poll = self._poller.poll
        if wait <= 0:
            return poll(0)
        now = time.monotonic()
        until = now + wait
        awake = min(self._patience.until, until)
        while now < awake:
            if ready := poll(0):
                return ready
            now = time.monotonic()
        # Never less than nothing, which is for ever.
        return poll(max(0, int((until - now) * 1000)))

    def send(self, peer: Connection, message: EngineReply) -> None:
        """Send, or note that the peer is gone."""
        data = reply_codec.encode(message)
        if peer.identity in self._lanes:
            if not self._lanes.send(peer.identity, data):
                self._lose(peer)
            return
        try:
            self._socket.send_multipart([peer.identity, data], zmq.NOBLOCK, copy=True)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._lose(peer)

    def _lose(self, peer: Connection) -> None:
        if not peer.gone:
            peer.gone = True
            self.lost.append(peer)

    def drop(self, peer: Connection) -> None:
        """Forget a peer that was lost."""
        self._peers.pop(peer.identity, None)
        self._lanes.drop(peer.identity)

    def flush(self) -> None:
        """Send every outbox that has something to say and the credit for it."""
        for peer in self:
            if (message := peer.outbox.take()) is not None:
                self.send(peer, message)

    def beat(self, step: int, running: int, waiting: int) -> None:
        """Tell everybody, once a second, that the loop is alive."""
        now = time.monotonic()
        if now - self._beaten >= BEAT_SECONDS:
            self._beaten = now
            beat = Beat(step=step, running=running, waiting=waiting)
            for peer in self:
                self.send(peer, beat)

    def close(self) -> None:
        self._lanes.close()
        self._socket.close()
        self._context.term()
