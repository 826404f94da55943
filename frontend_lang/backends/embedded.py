"""`Runtime`: a runtime of one's own, started and stopped with the object."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from ramet.runtime.protocol import ErrorInfo

from . import _loop
from .remote import RemoteBackend

CHECK_SECONDS = 0.25


class Runtime(RemoteBackend):
    """Starts a gateway and an engine process on sockets of their own, and runs programs there.

    ``model_path`` is an alias (``ramet models list``), a folder, a ``.gguf`` file or a hub id; the
    other keywords are the engine's settings. Use it as a context manager or call `shutdown`; it
    also ends with the interpreter. Raises TypeError for an unknown setting, `BadInputError` for a
    bad one, `ModelError` for a model that is not there, `BackendError` when a process dies.
    """

    def __init__(
        self,
        model_path: str = "smollm2-135m-instruct",
        *,
        on_progress: Callable[[str, float], None] | None = None,
        on_log: Callable[[str, str], None] | None = None,
        **settings: Any,
    ) -> None:
        from ramet.runtime import launch

        self._stopping = threading.Event()
        self._owner = os.getpid()
        self.launched = launch.start(
            {"model_path": model_path, **settings}, on_progress=on_progress, on_log=on_log
        )
        try:
            keys = self.launched.config.api_keys
            super().__init__(self.launched.address, keys[0] if keys else None)
        except BaseException:
            self.launched.stop()
            raise
        weakref.finalize(self, self._stopping.set)
        threading.Thread(
            target=_watch, args=(weakref.ref(self), self._stopping), name="ramet-watch", daemon=True
        ).start()

    def shutdown(self) -> None:
        """Stop the processes; what runs fails with a `BackendError`. Idempotent."""
        self._stopping.set()
        super().shutdown()
        self.launched.stop()

    def _check_alive(self) -> None:
        if os.getpid() != self._owner:
            return  # a fork cannot tell: the processes are its parent's children
        error = self.launched.check()
        if error is not None:
            raise error.exception()

    def fail_if_dead(self) -> bool:
        """Fail everything that waits once a process of the runtime is dead."""
        error = self.launched.check()
        if error is None:
            return False
        connection = self._connection
        if connection is not None:
            info = ErrorInfo("backend", error.message, error.where)
            _loop.soon(connection.close, info)
        return True


def _watch(runtime: weakref.ref[Runtime], stopping: threading.Event) -> None:
    while not stopping.wait(CHECK_SECONDS):
        alive = runtime()
        if alive is None or alive.fail_if_dead():
            return
        del alive
