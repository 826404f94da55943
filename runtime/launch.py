"""Starts a runtime: a gateway and an engine process, on sockets in a private folder. Torch-free."""

from __future__ import annotations

import atexit
import ipaddress
import logging
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from .config import KEY_VARIABLES, ZMQ_PORT, EngineConfig
from .folder import SocketFolder
from .keys import check_keys, read_keys
from .process import Child, Word
from .protocol.errors import BackendError, BadInputError, ErrorInfo

MODULES = {"gateway": f"{__package__}.gateway", "engine": f"{__package__}.engine"}
"""What each child process runs, as ``python -m``."""

Progress = Callable[[str, float], None]
"""Called with what has just begun or happened, and the seconds since the start."""

Log = Callable[[str, str], None]
"""Called with a child's name and one line of its stderr, from a thread of the launcher."""

STOP_SECONDS = 5.0
MOST_RESTARTS, RESTART_WINDOW_SECONDS = 3, 300.0
"""An engine that died more often than that, in that time, stays dead."""
_LOOK_SECONDS = 0.1
# How long an engine's threads on the CPU spin before they sleep. For milliseconds, the default, is
# right on an idle machine only; beside other work each spins away the time that the other needs:
# measured 20 times slower. Not to spin at all costs a third. The user's own choice stays.
_SPIN_VARIABLE, _SPINS = "GOMP_SPINCOUNT", "2000"


def start(
    settings: Mapping[str, Any],
    *,
    on_progress: Progress | None = None,
    on_log: Log | None = None,
    listen: bool = False,
    timeout: float = 1800.0,
) -> Launched:
    """Start a runtime and wait until it serves.

    ``settings`` are `EngineConfig`'s names and aliases. With ``listen`` the gateway also serves
    ``tcp://host:zmq_port`` and ``http://host:port``. The model is fetched first when it is one of
    the catalog and absent.

    Raises `BadInputError` for bad settings, `ModelError` for a model that is not there or does not
    load, `BackendError` when a process dies or takes longer than ``timeout`` seconds to start.
    """
    config = _with_keys(EngineConfig.from_settings(settings))
    binds = [_endpoint(config)] if listen else []
    if listen:
        _check_ports(config)
    progress = _Stopwatch(on_progress)
    if not listen:
        _resolve(config, progress)
    folder = SocketFolder()
    launched = Launched(config, folder, binds, on_log or _log_to_logging)
    try:
        if listen:  # the gateway binds its ports meanwhile: it can say that the model loads
            _resolve(config, progress)
        launched._let_load()
        launched._wait_until_ready(progress, timeout)
    except BaseException:
        launched.stop()
        raise
    return launched


class Launched:
    """A running gateway and engine. `stop` it; leaving the interpreter does so too."""

    def __init__(
        self, config: EngineConfig, folder: SocketFolder, binds: list[str], log: Log
    ) -> None:
        self.config = config
        self.address = folder.address("gateway")
        """Where clients on this machine connect: ``ipc://…``."""
        self.facts: dict[str, dict[str, Any]] = {}
        """What each process said when it was ready."""
        self._engine_address = folder.address("engine")
        self._binds = [self.address, *binds]
        self._folder = folder
        self._log = log
        self._words: queue.Queue[Word] = queue.Queue()
        self._children: list[Child] = []
        self._owner = os.getpid()
        self._stopping = threading.Lock()
        self._stopped = threading.Event()
        self._have_model = threading.Event()
        self._serving = False
        self._deaths: list[float] = []
        self._started: queue.Queue[BaseException | None] = queue.Queue()
        # The kernel ends a child when the thread that made it ends: so a thread that stays.
        threading.Thread(target=self._own_children, daemon=True, name="ramet-launcher").start()
        atexit.register(self.stop)
        try:
            self._check_started()
        except BackendError:
            self.stop()
            raise

    @property
    def model(self) -> str:
        """The name that clients see."""
        return self.config.model_name

    @property
    def tokenizer(self) -> str | None:
        """A folder that holds the model's tokenizer, where there is one."""
        return self.facts.get("gateway", {}).get("tokenizer")

    @property
    def url(self) -> str | None:
        """Where HTTP is served, with the port really taken."""
        return self.facts.get("gateway", {}).get("url")

    @property
    def addresses(self) -> list[str]:
        """All endpoints of the gateway, the private one first."""
        bound = self.facts.get("gateway", {}).get("addresses") or self._binds
        return [re.sub(r"\[::ffff:([\d.]+)\]", r"\1", address) for address in bound]

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name: gateway, engine."""
        return {child.name: child.pid for child in self._children}

    def check(self) -> ErrorInfo | None:
        """Why the runtime no longer works, or None while both processes run, or will again."""
        if self._stopped.is_set():
            return ErrorInfo("backend", "the runtime was shut down")
        for child in list(self._children):
            error = child.dead()
            revives = child.name == "engine" and self.config.restart_engine and self._may_revive()
            if error is not None and not revives:
                return error
        return None

    def stop(self, grace: float | None = None) -> None:
        """End the gateway, which drains, then the engine, and remove the sockets. Each is killed
        after ``grace`` seconds (`STOP_SECONDS`). Safe to call twice, from any thread; in a fork of
        the owner it does nothing."""
        if os.getpid() != self._owner:
            return
        with self._stopping:
            if self._stopped.is_set():
                return
            for child in self._children:
                child.stop(STOP_SECONDS if grace is None else grace)
            self._folder.remove()
            self._stopped.set()
            self._have_model.set()
            atexit.unregister(self.stop)

    def _own_children(self) -> None:
        for name in MODULES:
            if name == "engine":
                self._have_model.wait()
            with self._stopping:
                if self._stopped.is_set():
                    self._started.put(BackendError("it was stopped"))
                    return
                try:
                    self._children.append(self._child(name))
                except OSError as failure:
                    self._started.put(failure)
                    return
            self._started.put(None)
        while not self._stopped.wait(_LOOK_SECONDS if self.config.restart_engine else None):
            if self._serving:
                self._hear()
                self._revive()

    def _let_load(self) -> None:
        """The model's files are there: start the engine. Raises `BackendError`."""
        self._folder.model_there.touch()
        self._have_model.set()
        self._check_started()

    def _check_started(self) -> None:
        failure = self._started.get()
        if failure is not None:
            raise BackendError(f"a process could not be started: {failure}") from failure

    def _child(self, name: str) -> Child:
        env = dict.fromkeys(KEY_VARIABLES.values(), "")  # whatever we inherited
        if name == "gateway":
            args = ["--engine", self._engine_address]
            args += [part for bind in self._binds for part in ("--bind", bind)]
            if len(self._binds) > 1:
                args += ["--http", "--drain", str(self.config.drain_seconds)]
                args += ["--wait-for", str(self._folder.model_there)]
            for setting, variable in KEY_VARIABLES.items():
                env[variable] = getattr(self.config, setting) or ""
        else:
            args = ["--bind", self._engine_address]
            env[_SPIN_VARIABLE] = os.environ.get(_SPIN_VARIABLE, _SPINS)
        return Child(
            name,
            MODULES[name],
            ["--config", self.config.to_json(), *args],
            words=self._words,
            log=self._log,
            env=env,
        )

    def _revive(self) -> None:
        """Start a dead engine again, unless it dies too often. The gateway finds it by its address,
        and has kept what it may submit again."""
        with self._stopping:
            place = [child.name for child in self._children].index("engine")
            error = self._children[place].dead()
            if self._stopped.is_set() or error is None or not self._may_revive():
                return
            self._deaths.append(time.monotonic())
            self._log("launcher", f"{error.message}; it is started again")
            try:
                self._children[place] = self._child("engine")
            except OSError as failure:
                self._log("launcher", f"the engine could not be started again: {failure}")

    def _may_revive(self) -> bool:
        since = time.monotonic() - RESTART_WINDOW_SECONDS
        return sum(death > since for death in self._deaths) < MOST_RESTARTS

    def _hear(self) -> None:
        """What an engine says that was started again."""
        while not self._words.empty():
            child, kind, said = self._words.get()
            if kind != "exit":
                self._log("launcher", f"{child.name}{' ready' if kind == 'ready' else f': {said}'}")

    def _wait_until_ready(self, progress: _Stopwatch, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while len(self.facts) < len(MODULES):
            try:
                child, kind, said = self._words.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                late = ", ".join(c.name for c in self._children if c.name not in self.facts)
                raise BackendError(f"not ready after {timeout:.0f} s: {late}") from None
            if kind == "exit":
                raise _start_failure(child)
            if kind == "ready":
                self.facts[child.name] = said
                progress(f"{child.name} ready")
            else:
                progress(f"{child.name}: {said}")
        self._serving = True


def _start_failure(child: Child) -> Exception:
    info = child.dead() or ErrorInfo("backend", f"the {child.name} closed its output")
    error = info.exception()
    for line in child.tail:
        error.add_note(f"{child.name}: {line}")
    return error


class _Stopwatch:
    def __init__(self, listener: Progress | None) -> None:
        self._listener = listener
        self._began = time.monotonic()

    def __call__(self, what: str) -> None:
        if self._listener is not None:
            self._listener(what, time.monotonic() - self._began)


def _endpoint(config: EngineConfig) -> str:
    """``tcp://address:port``; zmq binds to numbers, so names are looked up here."""
    try:
        found = socket.getaddrinfo(config.host, None, type=socket.SOCK_STREAM)
        found.sort(key=lambda entry: entry[0] != socket.AF_INET)  # as clients look names up
        address = ipaddress.ip_address(str(found[0][4][0]))
    except (OSError, ValueError) as error:
        raise BadInputError(f"host {config.host!r}: {error}", param="host") from None
    if not address.is_loopback and not config.api_key and not config.no_auth:
        raise BadInputError(
            f"host {config.host} can be reached from outside: set api_key, or no_auth",
            param="api_key",
        )
    host = f"[{address}]" if address.version == 6 else str(address)
    return f"tcp://{host}:{ZMQ_PORT if config.zmq_port is None else config.zmq_port}"


def _check_ports(config: EngineConfig) -> None:
    """Say that a port is taken before a model is fetched and loaded. Raises `BackendError`."""
    _check_port("http", config.host, config.port, "port")
    if config.zmq_port is not None:  # another is found where the usual one is taken
        _check_port("tcp", config.host, config.zmq_port, "zmq_port")


def _check_port(scheme: str, host: str, port: int, name: str) -> None:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise BackendError(
            f"cannot bind to {scheme}://{host}:{port}: {error.strerror}; another port is chosen "
            f"with {name} (--{name.replace('_', '-')})"
        ) from None


def _with_keys(config: EngineConfig) -> EngineConfig:
    """The settings with the keys of ``api_key_file`` read. Raises `BadInputError`, also for a key
    that no client could send."""
    keys = config.api_keys
    if config.api_key_file is not None:
        keys = (*keys, *read_keys(config.api_key_file))
    check_keys(keys, "api_key")
    for name in ("admin_key", "metrics_key"):
        check_keys(filter(None, [getattr(config, name)]), name)
    return msgspec.structs.replace(config, api_key=",".join(keys) or None, api_key_file=None)


def _resolve(config: EngineConfig, progress: _Stopwatch) -> None:
    from .model import store  # here, so that a bad setting costs no import

    progress("model files")
    store.resolve(config.model_path, fetch=True)


def _log_to_logging(name: str, line: str) -> None:
    logging.getLogger(f"ramet.{name}").info(line)
