"""`Runtime`: a runtime of one's own, started and stopped with the object."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from ramet.runtime.protocol import ErrorInfo

from . import _loop
from .remote import RemoteBackend

CHECK_SECONDS = 0.25
OF_SERVERS = frozenset((
    "host", "port", "zmq_port", "no_auth", "curve", "metrics_key", "cors_origin", "ssl_certfile",
    "ssl_keyfile", "max_body_bytes", "max_choices", "drain_seconds", "disable_vllm_metrics",
    "tool_call_parser", "reasoning_parser", "trust_request_chat_template",
))  # fmt: skip
"""Settings without effect where nothing is served over HTTP or TCP. Keys of clients hold also for
the socket that other processes of this user can reach."""


class Runtime(RemoteBackend):
    """Starts a gateway and an engine process on sockets of their own, and runs programs there.

    ``model_path`` is an alias (``ramet models list``), a folder, a ``.gguf`` file or a hub id; the
    other keywords are the engine's settings. Use it as a context manager or call `shutdown`; it
    also ends with the interpreter. Raises TypeError for an unknown setting, `BadInputError` for a
    bad one, `ModelError` for a model that is not there, `BackendError` when a process dies; warns
    of one that only ``ramet serve`` has a use for.
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

        _warn_of_servers(settings)
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


def _warn_of_servers(settings: Mapping[str, Any]) -> None:
    """Say of a setting that says how others are served that it does nothing here."""
    for given, value in settings.items():
        if value is not None and given.replace("-", "_") in OF_SERVERS:
            warnings.warn(
                f"setting {given} is of `ramet serve`: a Runtime listens on no port and serves "
                "nobody else",
                stacklevel=3,
            )


def _watch(runtime: weakref.ref[Runtime], stopping: threading.Event) -> None:
    while not stopping.wait(CHECK_SECONDS):
        alive = runtime()
        if alive is None or alive.fail_if_dead():
            return
        del alive
