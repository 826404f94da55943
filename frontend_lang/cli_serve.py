"""``ramet serve``: a runtime for programs of other processes, and for clients of HTTP."""

from __future__ import annotations

import signal
import sys
import time
from typing import Annotated, Any

import typer

from .cli_settings import with_model, with_settings

_CHECK_SECONDS = 0.1


@with_settings()
def serve(
    model: Annotated[
        str | None, typer.Argument(help="Alias, folder, .gguf file or hub id.", show_default=False)
    ] = None,
    *,
    settings: dict[str, Any],
) -> None:
    """Serve a model at http://HOST:PORT and tcp://HOST:ZMQ_PORT until Ctrl-C or SIGTERM, which give
    what runs --drain-seconds.

    Clients of OpenAI's API connect to http://HOST:PORT/v1, programs with
    ramet.RuntimeEndpoint("tcp://…").
    """
    from ramet.runtime import launch

    settings = with_model(settings, model)
    asked: list[int] = []  # not an Event: a handler that runs while one is set waits for ever
    running = launch.start(settings, listen=True, on_progress=say_stage, on_log=say_log)
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: asked.append(number))
        public = [address for address in running.addresses if address.startswith("tcp://")]
        print(
            f"{running.model} is served at {' and '.join([*public, str(running.url)])}", flush=True
        )
        while not asked:
            time.sleep(_CHECK_SECONDS)
            error = running.check()
            if error is not None:
                running.stop()  # clients are told first
                raise error.exception()
        drain = running.config.drain_seconds
        print(f"what runs has {drain:g} s; Ctrl-C again to stop at once", file=sys.stderr)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        running.stop(drain + launch.STOP_SECONDS)
    finally:
        running.stop(0.0)


def say_stage(what: str, seconds: float) -> None:
    """One line of start-up on stderr."""
    print(f"{seconds:6.2f} s  {what}", file=sys.stderr, flush=True)


def say_log(name: str, line: str) -> None:
    """One line of a child's log on stderr."""
    print(f"[{name}] {line}", file=sys.stderr, flush=True)
