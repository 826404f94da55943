"""What a server must not forget when it starts again: the key of its namespaces and of what it
keeps on disk. Torch-free."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from pathlib import Path

from .protocol.errors import BadInputError

SECRET_NAME = "secret"
SECRET_BYTES = 32


def server_secret(folder: str | None, use: str) -> bytes:
    """32 bytes for one ``use``: of ``folder``, made there by whoever comes first and readable by
    this user only; without a folder they are of this process alone.

    Raises `BadInputError` (disk_cache_dir) where the folder is none, or cannot be used, or holds
    another user's secret.
    """
    if folder is None:
        return os.urandom(SECRET_BYTES)
    path = cache_folder(folder) / SECRET_NAME
    try:
        if not path.exists():
            _make(path)
        secret = _read(path)
    except OSError as error:
        raise _refused(folder, error) from None
    if len(secret) != SECRET_BYTES:
        found = len(secret) if len(secret) < 2 * SECRET_BYTES else "more"
        raise BadInputError(
            f"disk_cache_dir: {path} should hold {SECRET_BYTES} bytes, not {found}; remove "
            "it, and what is cached there with it",
            param="disk_cache_dir",
        )
    return hashlib.blake2b(use.encode(), key=secret, digest_size=SECRET_BYTES).digest()


def cache_folder(folder: str) -> Path:
    """The folder itself, made where it is not there. Raises `BadInputError`."""
    try:
        path = Path(folder).expanduser()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, ValueError, RuntimeError) as error:  # no such home, or no path at all
        raise _refused(folder, error) from None
    return path


def _read(path: Path) -> bytes:
    """What is there, or a little of it if that is too long. Raises `OSError`, also for what is no
    file, and for another user's: who made it could make blocks that are taken for ours."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{SECRET_NAME} is no file")
        if status.st_uid not in (os.geteuid(), 0):
            raise OSError(f"{SECRET_NAME} is of user {status.st_uid}")
        return file.read(2 * SECRET_BYTES)


def _make(path: Path) -> None:
    """Nobody ever sees half of it, and of two who make one the first wins."""
    descriptor, unfinished = tempfile.mkstemp(prefix=f"{SECRET_NAME}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(os.urandom(SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())  # an empty one would be in the way after a power cut
        with contextlib.suppress(FileExistsError):
            os.link(unfinished, path)
    finally:
        Path(unfinished).unlink()


def _refused(folder: str, error: Exception) -> BadInputError:
    reason = getattr(error, "strerror", None) or str(error)
    return BadInputError(
        f"disk_cache_dir: {folder} cannot be used: {reason}", param="disk_cache_dir"
    )
