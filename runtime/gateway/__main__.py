"""The gateway process: ``python -m ramet.runtime.gateway --config JSON --engine A --bind B``."""

from __future__ import annotations

from ..child import follow_parent, tell_error, tell_ready, tell_stage

if __name__ == "__main__":
    follow_parent()

import argparse
import asyncio
import contextlib
import logging
import resource
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import zmq

from ..config import EngineConfig
from ..protocol.errors import BadInputError, RametError

if TYPE_CHECKING:
    from .assembly import Gateway
    from .http.server import HttpServer

T = TypeVar("T")
DRAIN_S = 2.0
LINGER_MS = 500
MOST_FILES = 1 << 16
_LOOK_S = 0.01


def main(arguments: list[str] | None = None) -> int:
    """Serve until told to stop. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="ramet.runtime.gateway")
    parser.add_argument("--config", required=True, help="settings as a JSON object")
    parser.add_argument("--engine", required=True, help="the engine's address")
    parser.add_argument("--bind", action="append", required=True, help="where clients connect")
    parser.add_argument(
        "--drain", type=float, default=DRAIN_S, help="seconds that running work gets at the end"
    )
    parser.add_argument(
        "--http", action="store_true", help="also serve HTTP at the settings' host and port"
    )
    parser.add_argument(
        "--wait-for", type=Path, help="a file that is there once the model's files are"
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(message)s")
    _open_many_files()
    try:
        config = EngineConfig.from_json(options.config)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve(config, options))
    except RametError as error:
        tell_error(error)
        return 1
    return 0


def _open_many_files() -> None:
    """As many connections as the system lets this process have; the usual limit is far below."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's loop, which does with half the time, where there is one."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _serve(config: EngineConfig, options: argparse.Namespace) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    http = await _http(config) if options.http else None  # first: it says that the model loads
    gateway = await _unless(stop, _assembled(config, options))
    if gateway is None:
        if http is not None:
            await http.close()
        return
    if http is not None:
        _attach(http, gateway, config)
    tell_ready(
        url=None if http is None else http.url,
        addresses=gateway.addresses,
        model=gateway.service.model,
        tokenizer=gateway.tokenizer_folder,
        context_length=gateway.service.executor.context_length,
    )
    await stop.wait()
    await gateway.close(options.drain, http)
    zmq.Context.instance().destroy(linger=LINGER_MS)  # waits until the last answers are out


async def _assembled(config: EngineConfig, options: argparse.Namespace) -> Gateway:
    from .assembly import assemble

    while options.wait_for is not None and not options.wait_for.exists():
        await asyncio.sleep(_LOOK_S)
    tell_stage("tokenizer")
    return await assemble(config, options.engine, options.bind)


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What the work gives; ``None`` where it is told to stop before that."""
    task, told = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    await asyncio.wait((task, told), return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        told.cancel()
        return task.result()
    task.cancel()
    await asyncio.wait((task,))
    return None


async def _http(config: EngineConfig) -> HttpServer:
    from .http.server import HttpServer, bind_http, is_loopback, tls_context
    from .http.state import HttpLimits, HttpState

    if not is_loopback(config.host) and not config.api_key and not config.no_auth:
        raise BadInputError(
            f"host {config.host} can be reached from other machines: set api_key, or no_auth",
            param="api_key",
        )
    state = HttpState(
        HttpLimits(body_bytes=config.max_body_bytes, samples=config.max_choices),
        config.api_keys,
        admin_key=config.admin_key,
        metrics_key=config.metrics_key,
        vllm_names=not config.disable_vllm_metrics,
    )
    tls = tls_context(config.ssl_certfile, config.ssl_keyfile)
    server = HttpServer(
        bind_http(config.host, config.port), state, tls=tls, cors_origins=config.cors_origins
    )
    await server.started()
    return server


def _attach(http: HttpServer, gateway: Gateway, config: EngineConfig) -> None:
    from .http.state import Live, defaults_of

    defaults = defaults_of(gateway.sampling_defaults)
    http.state.attach(
        Live(
            gateway.service,
            config.model_path,
            gateway.tokenizer_folder,
            defaults,
            tool_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
            trust_template=config.trust_request_chat_template,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
