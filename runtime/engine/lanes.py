"""The engine's lanes: gateways of this machine that are heard without a thread in between."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence

import zmq

from ..protocol.codec import MAX_MESSAGE_BYTES
from ..protocol.lane import Lane, accept, lane_path, listen

log = logging.getLogger(__name__)


class Lanes:
    """Registers what it waits for at ``poller``. A peer's lane is named by the identity of whoever
    speaks there; ``gone`` are those whose end came."""

    def __init__(self, address: str, poller: zmq.Poller) -> None:
        self._poller = poller
        self._lanes: dict[bytes, Lane] = {}
        self._of: dict[int, bytes] = {}
        self._numbers = itertools.count(1)
        self._listener = None
        self.gone: list[bytes] = []
        path = lane_path(address)
        if path is None:
            return
        try:
            self._listener = listen(path)
        except OSError as error:
            log.info("no lane beside %s: %s", address, error)
            return
        poller.register(self._listener.fileno(), zmq.POLLIN)

    def receive(self, ready: Sequence[object]) -> Iterator[tuple[bytes, list[bytes]]]:
        """Who says what, of the descriptors that the poller found ready."""
        for descriptor in ready:
            if self._listener is not None and descriptor == self._listener.fileno():
                self._accept()
                continue
            if not isinstance(descriptor, int) or descriptor not in self._of:
                continue
            identity = self._of[descriptor]
            lane = self._lanes[identity]
            try:
                if lane.blocked and lane.flush():
                    self._poller.register(descriptor, zmq.POLLIN)
                messages = lane.receive()
            except ConnectionError as error:
                log.debug("a lane has ended: %s", error)
                self.drop(identity)
                self.gone.append(identity)
                continue
            if messages:
                yield identity, messages

    def _accept(self) -> None:
        assert self._listener is not None
        while (lane := accept(self._listener, MAX_MESSAGE_BYTES)) is not None:
            identity = b"lane%d" % next(self._numbers)
            self._lanes[identity] = lane
            self._of[lane.fileno()] = identity
            self._poller.register(lane.fileno(), zmq.POLLIN)

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._lanes

    def send(self, identity: bytes, message: bytes) -> bool:
        """Whether the peer is there."""
        lane = self._lanes[identity]
        try:
            lane.send((message,))
        except ConnectionError:
            return False
        if lane.blocked:
            self._poller.register(lane.fileno(), zmq.POLLIN | zmq.POLLOUT)
        return True

    def drop(self, identity: bytes) -> None:
        """Close a peer's lane. Unknown ones are ignored."""
        lane = self._lanes.pop(identity, None)
        if lane is not None:
            self._poller.unregister(lane.fileno())
            del self._of[lane.fileno()]
            lane.close()

    def close(self) -> None:
        for identity in list(self._lanes):
            self.drop(identity)
        if self._listener is not None:
            self._poller.unregister(self._listener.fileno())
            self._listener.close()
