"""Blocks of KV as files: one a block, whole or not there, and refused when it is not ours."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..protocol.errors import BadInputError
from .block_chain import BLOCK, KEY_BYTES

log = logging.getLogger(__name__)

FORMAT = 1
_MAGIC = b"RAMETKV\n"
_HEAD = struct.Struct("<8sIIQ32s32s")
"""Magic, format, tokens a block, bytes of KV, the stamp, the block's name; then the seal."""
_SEAL_BYTES = 32
HEADER_BYTES = _HEAD.size + _SEAL_BYTES
_SECTOR = 4096
_SUFFIX, _UNFINISHED = ".kv", ".part"
_DEAD_SECONDS = 600.0
"""An unfinished file that nobody wrote to for so long is nobody's, though a process has the number
of its writer: in a container it may be one's own."""


class RefusedError(Exception):
    """A file that does not hold what its name says; the message says why."""


@dataclass(slots=True)
class Found:
    """One file of a folder that is looked through."""

    name: bytes
    used: float
    """When it was last read or written, by the file system's clock."""


class BlockFiles:
    """Files of one model's blocks in ``folder``, of ``block_bytes`` of KV each.

    ``stamp`` (32 bytes) says of which model, dtype and layout the KV is; ``secret`` seals what is
    written, so that what was damaged or comes from elsewhere is noticed. Files are readable by this
    user only. Safe in several threads, and for several processes in one folder.
    """

    def __init__(self, folder: Path, stamp: bytes, secret: bytes, block_bytes: int) -> None:
        """Raises `BadInputError` where nothing can be written."""
        assert len(stamp) == 32
        self.folder = folder
        self.block_bytes = block_bytes
        self.file_bytes = HEADER_BYTES + block_bytes
        self.disk_bytes = -(-self.file_bytes // _SECTOR) * _SECTOR
        """What a file takes of a disk."""
        self._stamp = stamp
        self._passed_over = False
        self._writer = f"{os.getpid()}-{secrets.token_hex(4)}{_UNFINISHED}"
        """Nobody else's, also where others see a process of this number."""
        self._sealing = hashlib.blake2b(
            key=secret, digest_size=_SEAL_BYTES, person=b"ramet-kv-seal"
        )
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = folder / self._writer
            os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            probe.unlink()
        except OSError as error:
            raise BadInputError(
                f"disk_cache_dir: {folder} cannot be written: {error.strerror or error}",
                param="disk_cache_dir",
            ) from None

    def path(self, name: bytes) -> Path:
        text = name.hex()
        return self.folder / text[:2] / f"{text}{_SUFFIX}"

    def write(self, name: bytes, payload: memoryview) -> None:
        """The file appears whole, under its name, or not at all. Raises `OSError`."""
        path = self.path(name)
        try:
            self._write(path, name, payload)
        except FileNotFoundError:  # a server that cannot see this process took it for left over
            self._write(path, name, payload)

    def _write(self, path: Path, name: bytes, payload: memoryview) -> None:
        unfinished = path.with_suffix(f".{self._writer}")
        head = _HEAD.pack(_MAGIC, FORMAT, BLOCK, len(payload), self._stamp, name)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                file.write(head + self._seal(head, payload))
                done = 0
                while done < len(payload):
                    done += file.write(payload[done:]) or 0
            unfinished.replace(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise

    def read(self, name: bytes, into: memoryview) -> None:
        """Fill ``into``. Raises `FileNotFoundError`, `RefusedError`, or another `OSError`; what is
        in ``into`` then means nothing."""
        path = self.path(name)
        # What was put in its place must not keep this thread: a pipe would, and a link's end might.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags), "rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise RefusedError(f"{path}: not a file")
            header = file.read(HEADER_BYTES)
            if len(header) < HEADER_BYTES:
                raise RefusedError(f"{path}: no whole header")
            magic, version, tokens, size, stamp, named = _HEAD.unpack_from(header)
            if magic != _MAGIC:
                raise RefusedError(f"{path}: not a block of KV")
            if version != FORMAT:
                raise RefusedError(f"{path}: format {version}, not {FORMAT}")
            if stamp != self._stamp:
                raise RefusedError(f"{path}: of another model, dtype or layout")
            if (tokens, size, named) != (BLOCK, self.block_bytes, name) or size != len(into):
                raise RefusedError(f"{path}: another block than its name says")
            done = 0
            while done < size:
                got = file.readinto(into[done:])
                if not got:
                    raise RefusedError(f"{path}: cut short")
                done += got
        head, seal = header[: _HEAD.size], header[_HEAD.size :]
        if not hmac.compare_digest(seal, self._seal(head, into)):
            raise RefusedError(f"{path}: damaged, or sealed by another server")
        with contextlib.suppress(OSError):  # it only says that it was used
            os.utime(path)

    def remove(self, name: bytes) -> None:
        self.path(name).unlink(missing_ok=True)

    def scan(self) -> list[Found]:
        """What is there, the file used longest ago first. What a dead process left unfinished is
        removed; what has another size or name is passed over with a warning."""
        found: list[Found] = []
        foreign = 0
        for entry in self._entries():
            try:
                file = self._looked_at(entry)
            except FileNotFoundError:  # another server removed it just now
                continue
            except OSError as error:
                self._pass_over(entry.path, error)
                continue
            if file is not None:
                found.append(file)
            elif not entry.name.endswith(_UNFINISHED):
                foreign += 1
        if foreign:
            log.warning(
                "%s: %d files are no blocks of this cache: not loaded", self.folder, foreign
            )
        found.sort(key=lambda file: file.used)
        return found

    def _looked_at(self, entry: os.DirEntry[str]) -> Found | None:
        """``None`` for what is no block."""
        stem, _, suffix = entry.name.partition(".")
        status = entry.stat(follow_symlinks=False)
        if entry.name.endswith(_UNFINISHED):
            writer = suffix.removesuffix(_UNFINISHED).partition("-")[0]
            if not _alive(writer) or status.st_mtime < time.time() - _DEAD_SECONDS:
                Path(entry.path).unlink(missing_ok=True)
            return None
        right = stat.S_ISREG(status.st_mode) and status.st_size == self.file_bytes
        if right and _is_name(stem) and f".{suffix}" == _SUFFIX:
            return Found(bytes.fromhex(stem), status.st_mtime)
        return None

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        for folder in list(os.scandir(self.folder)):
            if len(folder.name) == 2 and folder.is_dir(follow_symlinks=False):
                try:
                    yield from os.scandir(folder.path)
                except OSError as error:
                    self._pass_over(folder.path, error)

    def _pass_over(self, path: str, error: OSError) -> None:
        """There may be many: one is named."""
        if not self._passed_over:
            log.warning("disk cache: %s, and maybe others: %s", path, error.strerror)
        self._passed_over = True

    def _seal(self, head: bytes, payload: memoryview) -> bytes:
        sealed = self._sealing.copy()
        sealed.update(head)
        sealed.update(payload)
        return sealed.digest()


def _is_name(text: str) -> bool:
    return len(text) == 2 * KEY_BYTES and all(c in "0123456789abcdef" for c in text)


def _alive(pid: str) -> bool:
    """Whether some process has this number; a file whose name says none is nobody's."""
    if not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
