"""Puts a gateway together from its settings: tokenizer, engine, bound socket, service."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import zmq

from ..config import ZMQ_PORT, EngineConfig
from ..model.store import resolve
from ..protocol.awake import spin_seconds
from ..protocol.errors import BackendError, BadInputError
from ..protocol.lane import Listener, lane_path, listen
from ..server_secret import server_secret
from ..version import version
from .curve import server_keys
from .engine_client import EngineClient
from .executor import EngineExecutor
from .service import Service, ServiceLimits
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from .http.server import HttpServer

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Gateway:
    """A gateway that serves. ``addresses`` are where it is bound, with the ports really taken."""

    service: Service
    addresses: list[str]
    tokenizer_folder: str | None
    sampling_defaults: dict[str, Any]
    """What the model's generation_config.json says."""

    async def close(self, drain_s: float, http: HttpServer | None = None) -> None:
        """Give what runs ``drain_s`` seconds, then cancel it and let go of all sockets."""
        closing = [self.service.close(drain_s)]
        if http is not None:
            closing.append(http.close(drain_s))
        await asyncio.gather(*closing)
        self.service.executor.engine.close()


async def assemble(config: EngineConfig, engine_address: str, binds: list[str]) -> Gateway:
    """Raises `BadInputError` for an address that needs a key and has none, `ModelError` for the
    tokenizer, `BackendError` for an address in use or an engine that does not answer."""
    for address in binds:
        check_address(address, bool(config.api_key), config.no_auth)
    engine = EngineClient(engine_address, resubmit=config.restart_engine, spin=spin_seconds())
    try:
        files = resolve(config.model_path)
        source = resolve(config.tokenizer_path) if config.tokenizer_path else None
        tokenizer = Tokenizer.from_files(files, source=source, chat_template=_template(config))
        limits = ServiceLimits()
        secret = server_secret(config.disk_cache_dir, "namespaces")
        made, addresses = bind(binds, config, limits)
        facts = await engine.start()
    except BaseException:
        engine.close()
        raise
    context_length = int(facts.get("context_length") or config.context_length or 0)
    if context_length <= 0:
        engine.close()
        raise BackendError("the engine does not say how long its context is")
    draws = random.Random(config.random_seed)
    executor = EngineExecutor(engine, tokenizer, context_length, draws, secret)
    folder = str((source or files).path)
    service = Service(
        made,
        executor,
        model=config.model_name,
        version=version(),
        tokenizer_folder=folder,
        api_key=config.api_keys,
        admin_key=config.admin_key,
        limits=limits,
        lanes=_lanes(addresses),
        spin=min(spin_seconds(), float(facts.get("spin_seconds", 0.0))),
    )
    return Gateway(service, addresses, folder, files.generation_config())


def check_address(address: str, has_key: bool, no_auth: bool = False) -> None:
    """Only ipc and tcp; beyond this machine only with an API key or ``no_auth``. Raises
    `BadInputError`."""
    if address.startswith("ipc://"):
        return
    if not address.startswith("tcp://"):
        raise BadInputError(f"cannot bind to {address!r}: ipc:// or tcp:// is needed", param="bind")
    host = urlsplit(address).hostname or "*"
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    if not local and not has_key and not no_auth:
        raise BadInputError(
            f"{address} can be reached from other machines: set an API key, or no_auth",
            param="api_key",
        )


def router(limits: ServiceLimits) -> zmq.Socket[bytes]:
    """A ROUTER socket for a `Service`. Few messages wait inside of it, as it does not count bytes;
    the service does."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.SNDHWM, 100)
    socket.setsockopt(zmq.MAXMSGSIZE, 2 * limits.message_bytes)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15_000)
    socket.setsockopt(zmq.HEARTBEAT_TTL, 15_000)
    return socket


def bind(
    binds: list[str], config: EngineConfig, limits: ServiceLimits
) -> tuple[zmq.Socket[bytes], list[str]]:
    """A bound socket. CURVE, where it is on, holds for tcp; an ipc socket is this user's alone."""
    made = router(limits)
    addresses: list[str] = []
    address = ""
    try:
        for address in sorted(binds, key=lambda address: not address.startswith("ipc://")):
            if config.curve and address.startswith("tcp://"):
                _encrypt(made, config.curve)
            made.setsockopt(zmq.IPV6, int("[" in address))
            _bind_near(made, address, config)
            addresses.append(_last_endpoint(made))
    except zmq.ZMQError as error:
        made.close(0)
        hint = "; another port is chosen with zmq_port (--zmq-port)"
        raise BackendError(
            f"cannot bind to {address}: {zmq.strerror(error.errno or 0)}"
            f"{hint if address.startswith('tcp://') else ''}"
        ) from None
    return made, addresses


def _lanes(addresses: list[str]) -> Listener | None:
    """Where clients of this machine may speak without ZMQ's threads in between."""
    path = next((path for address in addresses if (path := lane_path(address))), None)
    try:
        return listen(path) if path is not None else None
    except OSError as error:
        log.info("no lanes at %s: %s", path, error)
        return None


def _bind_near(socket: zmq.Socket[bytes], address: str, config: EngineConfig) -> None:
    """Bind to an address; to any port of its host when it is the usual one, nobody asked for it and
    it is taken, as by another server on this machine."""
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        host, _, port = address.rpartition(":")
        usual = address.startswith("tcp://") and config.zmq_port is None and port == str(ZMQ_PORT)
        if not usual or error.errno != zmq.EADDRINUSE:
            raise
        log.warning("port %s is taken by somebody else; programs find another", port)
        socket.bind(f"{host}:*")


def _last_endpoint(socket: zmq.Socket[Any]) -> str:
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    return endpoint.rstrip(b"\0").decode() if isinstance(endpoint, bytes) else str(endpoint)


def _encrypt(socket: zmq.Socket[Any], folder: str) -> None:
    keys = server_keys(Path(folder))
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)


def _template(config: EngineConfig) -> str | None:
    if config.chat_template is None:
        return None
    try:
        return Path(config.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(
            f"cannot read the chat template {config.chat_template}: {error}", param="chat_template"
        ) from None
