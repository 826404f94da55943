"""A stream of whole messages between two processes of one machine, without a thread in between.

Beside each ``ipc://`` address there is a lane at the path ``….lane``. A ZMQ socket hands a message
to a thread of its own, which hands it to the peer's: two threads to wake on each way, much of what
a short request costs. A lane is one system call on each side. Messages, handshake and rights are
those of the ZMQ socket; that one tells who is alive, and serves whoever knows no lanes.

On the wire: the length of a message, four bytes little-endian, and the message.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_HEADER = struct.Struct("<I")
_AT_ONCE = 1 << 18
_BUFFER = 4 << 20
"""What the kernel is asked to hold of each way."""
_LONGEST_PATH = 107
_NONE_LEFT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def lane_path(address: str) -> str | None:
    """Where the lane beside an address is; ``None`` where there can be none."""
    if not address.startswith("ipc:///"):
        return None
    path = address.removeprefix("ipc://") + ".lane"
    return path if len(os.fsencode(path)) <= _LONGEST_PATH else None


class Listener(socket.socket):
    """For `accept`. Holds a descriptor back, with which to turn peers away when no others are left:
    left in the queue they would wait for a welcome, and wake whoever polls here for ever."""

    def __init__(self) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self._held_back = os.open(os.devnull, os.O_RDONLY)

    def turn_away(self) -> bool:
        """Hang up on the next peer, which then goes on by ZMQ. False where that is impossible."""
        if self._held_back < 0:
            return False
        os.close(self._held_back)
        self._held_back = -1
        try:
            self.accept()[0].close()
        except OSError:
            return False
        finally:
            with suppress(OSError):
                self._held_back = os.open(os.devnull, os.O_RDONLY)
        return True

    def close(self) -> None:
        """Idempotent."""
        if self._held_back >= 0:
            os.close(self._held_back)
            self._held_back = -1
        super().close()


def listen(path: str) -> Listener:
    """A socket of this user's alone, for `accept`. Raises OSError."""
    listener = Listener()
    try:
        with suppress(FileNotFoundError):
            Path(path).unlink()  # of one that was killed
        os.fchmod(listener.fileno(), 0o600)  # before it can be seen
        listener.bind(path)
        listener.listen(128)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def accept(listener: Listener, max_bytes: int) -> Lane | None:
    """The next peer that has connected, if there is one. Where there are no descriptors for them
    peers are turned away."""
    while True:
        try:
            return Lane(listener.accept()[0], max_bytes)
        except OSError as error:
            if error.errno not in _NONE_LEFT or not listener.turn_away():
                return None


def connect(address: str, max_bytes: int) -> Lane | None:
    """A lane to whoever listens beside an address; ``None`` where nobody does."""
    path = lane_path(address)
    if path is None:
        return None
    try:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError:  # no descriptors left
        return None
    try:
        connected.setblocking(False)
        connected.connect(path)
    except OSError:
        connected.close()
        return None
    return Lane(connected, max_bytes)


_open: weakref.WeakSet[Lane] = weakref.WeakSet()
_forks = False


def _leave_to_parent() -> None:
    """In a fork: lanes are the parent's. Held here too, they would not end with it, and the peer
    would never know."""
    for lane in list(_open):
        lane.close()


def _watch_forks() -> None:
    global _forks
    if not _forks:
        _forks = True
        os.register_at_fork(after_in_child=_leave_to_parent)


class Lane:
    """One end. Nothing here waits: what the kernel does not take stays, and goes first with the
    next `flush`. A message beyond ``max_bytes`` is the end of it."""

    def __init__(self, connected: socket.socket, max_bytes: int) -> None:
        connected.setblocking(False)
        with suppress(OSError):
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self._socket = connected
        self._max_bytes = max_bytes
        self._unsent = bytearray()
        self._partial = bytearray()
        _watch_forks()
        _open.add(self)

    def fileno(self) -> int:
        """-1 when it is closed."""
        return self._socket.fileno()

    @property
    def blocked(self) -> bool:
        """Whether something waits for the peer to read."""
        return bool(self._unsent)

    def send(self, messages: Sequence[bytes]) -> None:
        """Send messages together. Raises `ConnectionError` when the peer is gone."""
        parts: list[bytes] = []
        for message in messages:
            parts += (_HEADER.pack(len(message)), message)
        data = b"".join(parts)
        if self._unsent:
            self._unsent += data
            return
        sent = self._write(data)
        if sent < len(data):
            self._unsent += memoryview(data)[sent:]

    def flush(self) -> bool:
        """Send what waits; whether nothing does any more. Raises `ConnectionError`."""
        if self._unsent:
            del self._unsent[: self._write(self._unsent)]
        return not self._unsent

    def _write(self, data: bytes | bytearray) -> int:
        try:
            return self._socket.send(data, socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            return 0
        except ConnectionError:
            raise
        except OSError as error:
            raise ConnectionError(str(error)) from None

    def receive(self) -> list[bytes]:
        """Messages that are there, perhaps not all; empty when there are none. Raises
        `ConnectionError` when the peer is gone, after all that it sent."""
        try:
            data = self._socket.recv(_AT_ONCE)
        except (BlockingIOError, InterruptedError):
            return []
        except ConnectionError:
            raise
        except OSError as error:
            raise ConnectionError(str(error)) from None
        if not data:
            raise ConnectionResetError("the other side is gone")
        if self._partial:
            self._partial += data
            return self._cut_partial()
        messages, rest = self._cut(data)
        self._partial += data[rest:]
        return messages

    def _cut_partial(self) -> list[bytes]:
        messages, rest = self._cut(self._partial)
        if rest:
            del self._partial[:rest]
        return messages

    def _cut(self, data: bytes | bytearray) -> tuple[list[bytes], int]:
        """The whole messages at the beginning, and where the rest begins."""
        messages: list[bytes] = []
        at = 0
        while len(data) - at >= _HEADER.size:
            (size,) = _HEADER.unpack_from(data, at)
            if size > self._max_bytes:
                raise ConnectionError(f"a message of {size} bytes; the limit is {self._max_bytes}")
            begin, end = at + _HEADER.size, at + _HEADER.size + size
            if len(data) < end:
                break
            messages.append(bytes(data[begin:end]))
            at = end
        return messages, at

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()
