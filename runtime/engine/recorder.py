"""Records which requests came, for the simulator of policies: in its own thread, without tokens.

The engine hands a request over when it has ended, which takes no longer than putting it in a queue.
Where the thread does not keep up, requests are left out, and the file says how many.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np
import numpy.typing as npt

from ..protocol.errors import BadInputError
from ..scheduler.request import Request
from .trace_file import RECENT, Began, Entry, Hashes, frame, open_private

log = logging.getLogger(__name__)

MOST_WAITING_TOKENS = 1 << 24
MOST_BYTES = 16 << 30
"""A file grows no larger than that."""
_PROGRAMS = 1 << 16
"""Whose numbers are remembered; an older one that comes again is taken for another."""
_FLUSH_S = 1.0
_LIKE = 32
"""Requests whose first so many tokens are the same are compared."""
_FIRST = np.uint64(0x9E3779B97F4A7C15)
_SECOND, _THIRD = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(slots=True)
class _Noted:
    request: Request
    tokens: npt.NDArray[np.int32]
    ended: float
    counted: bool
    lost: int


class TokenHashes:
    """Of each token a hash of it and all before it, in 16 bits. The key is drawn here, and is
    nowhere else."""

    def __init__(self) -> None:
        self._key = os.urandom(32)

    def of(self, tokens: npt.NDArray[np.int32], namespace: bytes) -> Hashes:
        named = hashlib.blake2b(namespace, key=self._key, digest_size=16).digest()
        salt, cover = np.frombuffer(named, "<u8")
        places = np.arange(1, len(tokens) + 1, dtype=np.uint64) * _FIRST
        each = _mixed(_mixed(tokens.astype(np.uint64) ^ salt) + places)
        return (_mixed(np.cumsum(each, dtype=np.uint64) ^ cover) >> np.uint64(48)).astype(np.uint16)


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Every bit of a word in every bit of another."""
    x = (x ^ (x >> np.uint64(30))) * _SECOND
    x = (x ^ (x >> np.uint64(27))) * _THIRD
    return x ^ (x >> np.uint64(31))


class Unrecorded:
    """In the place of a `Recorder`."""

    def ended(self, request: Request, *, counted: bool) -> None:
        """Forget it."""

    def close(self) -> None:
        """Nothing is to be written."""


class Recorder:
    """Appends to a file that only its owner can read. Raises `BadInputError` where it cannot."""

    def __init__(self, path: str, *, slots: int, eviction: str, policy: str) -> None:
        try:
            if path == "-":
                raise OSError("is no file")
            self._file = open_private(Path(path).expanduser())
        except (OSError, RuntimeError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise BadInputError(f"record_trace: {path}: {reason}", param="record_trace") from None
        self._began = time.monotonic()
        self._queue: SimpleQueue[_Noted | None] = SimpleQueue()
        self._waiting = self._taken = 0
        """Tokens put into the queue, and taken out: each is written by one thread."""
        self._lost = 0
        self._broken = False
        self._hashes = TokenHashes()
        self._recent: OrderedDict[int, Hashes] = OrderedDict()
        self._alike: OrderedDict[bytes | int, int] = OrderedDict()
        self._programs: OrderedDict[tuple[bytes, int], int] = OrderedDict()
        self._entries = self._numbered = 0
        self._bytes = os.fstat(self._file).st_size
        began = Began(slots=slots, eviction=eviction, policy=policy, time=time.time())
        self._buffer = bytearray(frame(began))
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def ended(self, request: Request, *, counted: bool) -> None:
        """A request has ended; ``counted``: the engine's totals hold it. One that was never let in
        is not recorded. Returns at once."""
        if self._broken or not request.admitted:
            return
        tokens = request.tokens[: request.line]
        if self._waiting - self._taken + len(tokens) > MOST_WAITING_TOKENS:
            self._lost += 1
            return
        self._waiting += len(tokens)
        self._queue.put(_Noted(request, tokens, time.monotonic(), counted, self._lost))
        self._lost = 0

    def close(self) -> None:
        """Write what is there, and end."""
        self._queue.put(None)
        self._thread.join(10)

    # --- in the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        written = time.monotonic()
        try:
            while True:
                try:
                    noted = self._queue.get(timeout=_FLUSH_S)
                except Empty:
                    self._write()
                    continue
                if noted is None:
                    self._write()
                    return
                self._buffer += frame(self._entry(noted))
                self._taken += len(noted.tokens)
                if time.monotonic() - written > _FLUSH_S or len(self._buffer) > 1 << 20:
                    self._write()
                    written = time.monotonic()
        except OSError as error:
            log.error("no more is recorded: %s", error)
        finally:
            self._broken = True
            os.close(self._file)

    def _write(self) -> None:
        if self._bytes + len(self._buffer) > MOST_BYTES:
            raise OSError(f"the file has reached {MOST_BYTES >> 30} GiB")
        left = memoryview(self._buffer)
        while left:
            left = left[os.write(self._file, left) :]
        self._bytes += len(self._buffer)
        self._buffer = bytearray()

    def _entry(self, noted: _Noted) -> Entry:
        request = noted.request
        hashes = self._hashes.of(noted.tokens, request.namespace)
        program = self._program(request)
        back, common = self._like(hashes, program)
        most = request.prompt_len - 1
        if request.wants_prompt_logprobs:
            most = min(most, max(request.sampling.logprob_start - 1, 0))
        return Entry(
            arrived=request.arrival - self._began,
            admitted=request.admitted - self._began,
            ended=noted.ended - self._began,
            prompt=request.prompt_len,
            most=max(most, 0),
            cached=max(request.cached_tokens, 0),
            program=program,
            remaining=request.remaining,
            keep=request.keep is not None,
            counted=noted.counted,
            lost=noted.lost,
            back=back,
            common=common,
            rest=hashes[common:].astype("<u2").tobytes(),
        )

    def _program(self, request: Request) -> int:
        """Its number; programs of different gateways may have the same."""
        if request.program == 0:
            return 0
        key = request.connection, request.program
        number = self._programs.get(key)
        if number is None:
            self._numbered += 1
            number = self._programs[key] = self._numbered
            if len(self._programs) > _PROGRAMS:
                self._programs.popitem(last=False)
        return number

    def _like(self, hashes: Hashes, program: int) -> tuple[int, int]:
        """Which recent entry it begins like, counted back, and for how long. It is recent now."""
        keys: list[bytes | int] = [hashes[:_LIKE].tobytes()]
        if program:
            keys.append(program)
        best, common = 0, 0
        for key in keys:
            other = self._alike.get(key)
            if other is not None and other in self._recent:
                shared = _common(hashes, self._recent[other])
                if shared > common:
                    best, common = self._entries - other, shared
        for key in keys:
            self._alike[key] = self._entries
            self._alike.move_to_end(key)
        while len(self._alike) > 2 * RECENT:
            self._alike.popitem(last=False)
        self._recent[self._entries] = hashes
        if len(self._recent) > RECENT:
            self._recent.popitem(last=False)
        self._entries += 1
        return best, common


def _common(a: Hashes, b: Hashes) -> int:
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n
