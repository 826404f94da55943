"""What a server must not forget when it starts again: the key of its namespaces and of what it
keeps on disk. Torch-free."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

from .protocol.errors import BadInputError

SECRET_NAME = "secret"
SECRET_BYTES = 32


def server_secret(folder: str | None, use: str) -> bytes:
    """32 bytes for one ``use``: of ``folder``, made there by whoever comes first and readable by
    this user only; without a folder they are of this process alone.

    Raises `BadInputError` (disk_cache_dir) where the folder is none, or cannot be used.
    """
    if folder is None:
        return os.urandom(SECRET_BYTES)
    path = cache_folder(folder) / SECRET_NAME
    try:
        if not path.exists():
            _make(path)
        secret = path.read_bytes()
    except OSError as error:
        raise _refused(folder, error) from None
    if len(secret) != SECRET_BYTES:
        raise BadInputError(
            f"disk_cache_dir: {path} should hold {SECRET_BYTES} bytes, not {len(secret)}; remove "
            "it, and what is cached there with it",
            param="disk_cache_dir",
        )
    return hashlib.blake2b(use.encode(), key=secret, digest_size=SECRET_BYTES).digest()


def cache_folder(folder: str) -> Path:
    """The folder itself, there and this user's. Raises `BadInputError`."""
    path = Path(folder).expanduser()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _refused(folder, error) from None
    return path


def _make(path: Path) -> None:
    """Nobody ever sees half of it, and of two who make one the first wins."""
    descriptor, unfinished = tempfile.mkstemp(prefix=f"{SECRET_NAME}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(os.urandom(SECRET_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(unfinished, path)
    finally:
        Path(unfinished).unlink()


def _refused(folder: str, error: OSError) -> BadInputError:
    reason = error.strerror or str(error)
    return BadInputError(
        f"disk_cache_dir: {folder} cannot be used: {reason}", param="disk_cache_dir"
    )
