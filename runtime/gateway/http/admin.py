"""What operators and tools ask: health, models, what runs here, abort, flush."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...protocol.errors import BackendError, RametError
from ...version import version
from ..control import FLUSH_WAIT_S, flush_cache, server_info
from .answers import json_answer
from .errors import RETRY_AFTER, HttpError, bad
from .forms import AbortForm
from .guard import is_admin
from .held_program import HeldProgram
from .metrics import CONTENT_TYPE_LATEST
from .reading import read_form
from .state import HttpState

log = logging.getLogger(__name__)

_SCRAPE_WAIT_S = 2.0
_MOST_FLUSH_WAIT_S = 300.0


async def health(state: HttpState, _: Request) -> Response:
    """200 with no body while the engine's loop beats, else 503 that says why."""
    wrong = state.health()
    if wrong is not None:
        raise HttpError(503, wrong, headers=RETRY_AFTER)
    return Response(status_code=200)


async def ready(state: HttpState, request: Request) -> Response:
    """Whether requests are taken now."""
    state.need()
    return await health(state, request)


async def show_version(_: HttpState, __: Request) -> Response:
    return json_answer({"version": version()})


async def models(state: HttpState, request: Request) -> Response:
    live = state.need()
    card = {
        "id": live.model,
        "object": "model",
        "created": state.created,
        "owned_by": "ramet",
        "root": live.model_path,
        "parent": None,
        "max_model_len": live.executor.context_length,
        "permission": [],
    }
    name = request.path_params.get("name")
    if not name:  # none, or nothing behind a slash
        return json_answer({"object": "list", "data": [card]})
    state.need_model(name)
    return json_answer(card)


async def info(state: HttpState, _: Request) -> Response:
    """What runs here and how full it is; also under the names that SGLang's clients look for."""
    live = state.need()
    found = await server_info(live.service)
    found["programs"] += sum(isinstance(run, HeldProgram) for run in state.runs.values())
    found |= {
        "model_path": live.model_path,
        "served_model_name": live.model,
        "tokenizer_path": live.tokenizer_path or live.model_path,
        "http_requests": len(state.runs),
        "max_total_num_tokens": found.get("pages", {}).get("total"),
        "internal_states": [],
    }
    return json_answer(found)


async def model_info(state: HttpState, _: Request) -> Response:
    live = state.need()
    return json_answer(
        {
            "server": "ramet",
            "model_path": live.model_path,
            "tokenizer_path": live.tokenizer_path or live.model_path,
            "is_generation": True,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "served_model_name": live.model,
            "max_model_len": live.executor.context_length,
            "preferred_sampling_params": dict(live.defaults) or None,
        }
    )


async def abort(state: HttpState, request: Request) -> Response:
    """Abort one request by its id, or all: the caller's own, or anybody's for the admin. An id that
    does not run is no error: it may just have ended."""
    form = await read_form(request, AbortForm, state.limits.body_bytes)
    if not form.abort_all and not form.rid:
        raise bad("give rid or abort_all", "rid")
    everybody = is_admin(state, request.scope["headers"])
    runs = list(state.runs.values()) if everybody else state.mine()
    if not form.abort_all:
        runs = [run for run in runs if run.rid == form.rid]
    for run in runs:
        run.abort()
    return json_answer({"aborted": len(runs)})


async def flush(state: HttpState, request: Request) -> Response:
    """Waits for running requests to end, for ``timeout`` seconds where the query says so; refuses
    with 400 when that takes too long."""
    live = state.need()
    wait_s = _timeout(request.query_params.get("timeout"))
    try:
        data = await flush_cache(live.executor.engine, wait_s)
    except BackendError:
        raise
    except RametError as error:
        raise bad(f"the cache is not flushed: {error.message}") from None
    return json_answer({"success": True, **data})


def _timeout(given: str | None) -> float:
    if given is None:
        return FLUSH_WAIT_S
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= _MOST_FLUSH_WAIT_S:
        raise bad(f"timeout must be in [0, {_MOST_FLUSH_WAIT_S:g}] seconds", "timeout")
    return seconds


async def metrics(state: HttpState, _: Request) -> Response:
    found: dict[str, Any] = {}
    if state.live is not None:
        try:
            engine = state.live.executor.engine
            found = await asyncio.wait_for(engine.ask("info"), _SCRAPE_WAIT_S)
        except (TimeoutError, BackendError) as error:
            log.info("metrics without the engine's: %s", error)
    up = state.health() is None
    return Response(state.metrics.text(found, up), media_type=CONTENT_TYPE_LATEST)
