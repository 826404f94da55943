"""The folder that holds a runtime's sockets, and what removes it, however the runtime ends."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import IO

from .protocol.errors import BackendError

log = logging.getLogger(__name__)

_SOCKET_PATH_BYTES = 100  # a Unix socket's path holds 107
# Waits in the background until its input ends, which it does when the last process that holds the
# other end is gone, killed or not.
_JANITOR = 'exec 3<&0; { read -r _ <&3; rm -rf -- "$1"; } >/dev/null 2>&1 &'


class SocketFolder:
    """A folder that only this user can enter. A janitor removes it when this process dies. Should
    that be killed too, a later start can tell by the lock, which is held while this process lives.
    """

    def __init__(self) -> None:
        """Raises `BackendError` where there is no room, or no right, for one."""
        try:
            self._make()
        except OSError as error:
            raise BackendError(f"no folder for the runtime's sockets: {error}") from None

    def _make(self) -> None:
        base = Path(tempfile.gettempdir())
        if len(os.fsencode(base)) + len("/ramet-xxxxxxxx/gateway.ipc") > _SOCKET_PATH_BYTES:
            base = Path("/tmp")
        _sweep(base)
        self.path = Path(tempfile.mkdtemp(prefix="ramet-", dir=base))
        try:
            self._lock = self._locked()
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        self._life = _janitor(self.path)

    def _locked(self) -> int:
        unseen = self.path / "lock.new"
        lock = os.open(unseen, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unseen.rename(self.path / "lock")  # sweepers only see it locked
        except OSError:
            os.close(lock)
            raise
        return lock

    @property
    def model_there(self) -> Path:
        """A file that is there once the model's are."""
        return self.path / "model"

    def address(self, name: str) -> str:
        return f"ipc://{self.path / name}.ipc"

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        if self._life is not None:
            self._life.close()


def _janitor(folder: Path) -> IO[bytes] | None:
    """What to keep open for as long as the folder shall stay; ``None`` where there is no shell."""
    try:
        shell = subprocess.Popen(
            ["/bin/sh", "-c", _JANITOR, "ramet-janitor", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's signals are not for it
            cwd="/",
        )
    except OSError as error:
        log.info("nobody removes %s if this process is killed: %s", folder, error)
        return None
    shell.wait()
    return shell.stdin


def _sweep(base: Path) -> None:
    for lock in base.glob("ramet-*/lock"):
        try:
            if lock.parent.stat().st_uid != os.getuid():
                continue
            handle = os.open(lock, os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pass  # its owner lives
        else:
            shutil.rmtree(lock.parent, ignore_errors=True)
        finally:
            os.close(handle)
