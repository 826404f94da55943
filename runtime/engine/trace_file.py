"""The file of a recorded trace: which requests came, and what of their tokens was the same.

There are no tokens in it, and no text. Of each token there is a hash of all tokens up to it, in 16
bits, by a key that nobody keeps: equal beginnings are seen to be equal, and nothing else is. A
request that begins as a recent one did names that one, and holds hashes of the rest alone. A file
is a line that says what it is, then frames: a length in four bytes, and MessagePack.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

MAGIC = b"ramet-trace 1\n"
RECENT = 1024
"""A request can begin as one of so many before it did, as far as the file tells."""
LONGEST_FRAME = 1 << 26
_WORD = struct.Struct("<I")

Hashes = npt.NDArray[np.uint16]


class Began(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="began"):
    """A recording begins; nothing that came before is referred to."""

    slots: int
    """Tokens that the engine's cache holds."""
    eviction: str
    policy: str
    time: float
    """Unix time, in seconds."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="r"):
    """One request that was let in. Times are seconds from the beginning."""

    arrived: float
    admitted: float
    ended: float
    prompt: int
    """Tokens of its prompt; what follows is output."""
    most: int
    """How many of them may come from a cache, ..."""
    cached: int
    """... and did."""
    program: int = 0
    remaining: int = 0
    """How many requests of its program were known to follow."""
    keep: bool = False
    """Whether its stream was to go on from it."""
    counted: bool = True
    """Whether the engine's totals hold it: one that was aborted is not in there."""
    lost: int = 0
    """Requests before it that are missing, as too much came at a time."""
    back: int = 0
    """How many entries before it is the one that begins as it does, ..."""
    common: int = 0
    """... for so many tokens."""
    rest: bytes = b""
    """uint16, little-endian: hashes of the tokens behind these."""


@dataclass(slots=True)
class Seen:
    """An entry and the hashes of all its tokens."""

    entry: Entry
    hashes: Hashes


_decoder = msgspec.msgpack.Decoder(Began | Entry)
_encoder = msgspec.msgpack.Encoder()


def frame(message: Began | Entry) -> bytes:
    data = _encoder.encode(message)
    return _WORD.pack(len(data)) + data


def is_recorded(path: str | Path) -> bool:
    """Whether a file says that it is a recorded trace."""
    with Path(path).open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def open_private(path: str | Path) -> int:
    """Open for appending, for one writer, and so that nobody else can read it; a new file says what
    it is. What a writer that died had half written is cut off. Raises `OSError`, also for a link,
    and for what is no recorded trace, which stays as it is."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise FileExistsError("is a link") from None
        raise
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise FileExistsError("is no file")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # some file systems know no locks
            if isinstance(error, BlockingIOError):
                raise FileExistsError("another engine records there") from None
        head = os.pread(file, len(MAGIC), 0)
        if head != MAGIC and head != MAGIC[: status.st_size]:
            raise FileExistsError("is there already, and is no recorded trace")
        os.fchmod(file, 0o600)
        if head != MAGIC:  # new, or the disk was full at once
            os.ftruncate(file, 0)
            os.write(file, MAGIC)
        else:
            os.ftruncate(file, _whole_bytes(path))
    except BaseException:
        os.close(file)
        raise
    return file


def _whole_bytes(path: str | Path) -> int:
    """How much of a trace is whole frames."""
    size, at = Path(path).stat().st_size, len(MAGIC)
    with Path(path).open("rb") as file:
        file.seek(at)
        while len(head := file.read(_WORD.size)) == _WORD.size:
            (length,) = _WORD.unpack(head)
            if length > LONGEST_FRAME:
                raise FileExistsError(f"is damaged at byte {at}")
            end = at + _WORD.size + length
            if end > size:
                break
            file.seek(end)
            at = end
    return at


def read_trace(path: str | Path) -> Iterator[Began | Seen]:
    """What was recorded, in the order in which it ended. However long the file is, only what a next
    entry may refer to is held. The end of a file that was cut short is left out.

    Raises `ValueError` for a file that is no trace."""
    recent: deque[Hashes] = deque(maxlen=RECENT)
    with Path(path).open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError(f"{path} is no recorded trace")
        while len(head := file.read(_WORD.size)) == _WORD.size:
            (size,) = _WORD.unpack(head)
            if size > LONGEST_FRAME:
                raise ValueError(f"{path}: a frame of {size} bytes")
            data = file.read(size)
            if len(data) < size:
                return
            try:
                message = _decoder.decode(data)
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                raise ValueError(f"{path}: {error}") from None
            if isinstance(message, Began):
                recent.clear()
                yield message
                continue
            hashes = _whole(message, recent, path)
            recent.append(hashes)
            yield Seen(message, hashes)


def _whole(entry: Entry, recent: deque[Hashes], path: str | Path) -> Hashes:
    if len(entry.rest) % 2:
        raise ValueError(f"{path}: half a hash")
    rest = np.frombuffer(entry.rest, "<u2").astype(np.uint16)
    if not 0 <= entry.back <= len(recent):
        raise ValueError(f"{path}: an entry refers to {entry.back} before it")
    before = recent[-entry.back] if entry.back else rest[:0]
    if not 0 <= entry.common <= len(before):
        raise ValueError(f"{path}: an entry shares {entry.common} tokens with a shorter one")
    hashes = np.concatenate((before[: entry.common], rest))
    if not 0 <= entry.most <= entry.prompt <= len(hashes):
        raise ValueError(f"{path}: a prompt of {entry.prompt} tokens in {len(hashes)}")
    return hashes
