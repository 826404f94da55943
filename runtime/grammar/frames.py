"""What a compiler and its worker processes say to each other: msgpack in frames, over sockets."""

from __future__ import annotations

import os
import select
import time
from typing import Any, TypeVar

import msgspec

from ..protocol.errors import ErrorInfo
from .spec import Kind, Spec, Whitespace

_HEADER = 8
_CHUNK = 1 << 20


class WorkerDied(Exception):  # noqa: N818
    """The other end of the pipe is gone."""


class Hello(msgspec.Struct, frozen=True):
    """The vocabulary; first thing a server of workers is told. It answers with an empty `Reply`."""

    tokens: list[bytes]
    size: int
    eos_ids: tuple[int, ...]


class Born(msgspec.Struct, frozen=True):
    """First word of a process that will try a spec."""

    pid: int


class Job(msgspec.Struct, frozen=True):
    """A spec to try with one backend. ``last``: only while nobody else wants to compute."""

    backend: str
    kind: Kind
    text: str
    whitespace: Whitespace
    prefix: str = ""
    last: bool = False

    def spec(self) -> Spec:
        """The spec it is about."""
        return Spec(self.kind, self.text, self.whitespace, self.prefix)


class Reply(msgspec.Struct, omit_defaults=True):
    """What came of a job: data for the backend's `finish`, a refusal, or an error. ``leaves``: who
    answers takes no other job."""

    data: bytes = b""
    refused: str | None = None
    error: ErrorInfo | None = None
    leaves: bool = False


T = TypeVar("T", Hello, Born, Job, Reply)


def write_frame(fd: int, message: Any) -> None:
    """Send a message. Raises `WorkerDied`."""
    data = msgspec.msgpack.encode(message)
    view = memoryview(len(data).to_bytes(_HEADER, "little") + data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError:
        raise WorkerDied from None


def read_frame(fd: int, kind: type[T], *, limit: int, until: float | None = None) -> T:
    """The next message, of at most ``limit`` bytes. ``until``: monotonic time to give up at.

    Raises `TimeoutError`, `WorkerDied` (also for what is no such message).
    """
    size = int.from_bytes(_read(fd, _HEADER, until), "little")
    if size > limit:
        raise WorkerDied
    try:
        return msgspec.msgpack.decode(_read(fd, size, until), type=kind)
    except msgspec.DecodeError:
        raise WorkerDied from None


def _read(fd: int, size: int, until: float | None) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        if until is not None:
            poll = select.poll()  # select.select fails on descriptors above 1023
            poll.register(fd, select.POLLIN)
            if not poll.poll(max(until - time.monotonic(), 0.0) * 1000):
                raise TimeoutError
        try:
            chunk = os.read(fd, min(size - len(parts), _CHUNK))
        except OSError:
            raise WorkerDied from None
        if not chunk:
            raise WorkerDied
        parts += chunk
    return bytes(parts)
