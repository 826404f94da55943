"""The gateway process: ``python -m ramet.runtime.gateway --config JSON --engine A --bind B``."""

from __future__ import annotations

from ..child import follow_parent, tell_error, tell_ready, tell_stage

if __name__ == "__main__":
    follow_parent()

import argparse
import asyncio
import logging
import signal
import sys

import zmq

from ..config import EngineConfig
from ..protocol.errors import RametError

DRAIN_S = 2.0
LINGER_MS = 500


def main(arguments: list[str] | None = None) -> int:
    """Serve until told to stop. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="ramet.runtime.gateway")
    parser.add_argument("--config", required=True, help="settings as a JSON object")
    parser.add_argument("--engine", required=True, help="the engine's address")
    parser.add_argument("--bind", action="append", required=True, help="where clients connect")
    parser.add_argument(
        "--drain", type=float, default=DRAIN_S, help="seconds that running work gets at the end"
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(message)s")
    try:
        config = EngineConfig.from_json(options.config)
        asyncio.run(_serve(config, options.engine, options.bind, options.drain))
    except RametError as error:
        tell_error(error)
        return 1
    return 0


async def _serve(config: EngineConfig, engine: str, binds: list[str], drain: float) -> None:
    from .assembly import assemble

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    tell_stage("tokenizer")
    gateway = await assemble(config, engine, binds)
    tell_ready(
        addresses=gateway.addresses,
        model=gateway.service.model,
        tokenizer=gateway.tokenizer_folder,
        context_length=gateway.service.executor.context_length,
    )
    await stop.wait()
    await gateway.close(drain)
    zmq.Context.instance().destroy(linger=LINGER_MS)  # waits until the last answers are out


if __name__ == "__main__":
    sys.exit(main())
