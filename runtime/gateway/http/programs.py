"""``/v1/programs``: a whole program in one request, or in pieces under a lease."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...program.events import Done, Event, Failed, Value
from ...program.instructions import ROOT
from .answers import Events, event, json_answer, while_connected
from .errors import RETRY_AFTER, HttpError, cut
from .held_program import HeldProgram
from .opening import opened
from .program_forms import AppendForm, ProgramForm
from .reading import read_form
from .state import HttpState


async def open_program(state: HttpState, request: Request) -> Response:
    """Run a program. Closed: the answer is its result, or with ``stream`` its events. Open: the
    answer is its id at once, or with ``stream`` its events from now on. Raises `HttpError` and
    `RametError`."""
    form = await read_form(request, ProgramForm, state.limits.body_bytes)
    form.check()
    live = state.need_model(form.model)
    if sum(isinstance(run, HeldProgram) for run in state.runs.values()) >= state.limits.programs:
        state.metrics.rejected()
        raise HttpError(429, "too many programs at a time", headers=RETRY_AFTER)
    held = HeldProgram(state, live, f"prog-{secrets.token_hex(16)}", form)
    try:
        held.feed(form.program.instructions if form.program else (), form.closed is not False)
    except BaseException:
        await held.end()
        raise
    if form.stream:
        return await _streamed(request, held, owned=True)
    if not held.closed:
        return json_answer(_shown(held))
    return await _whole(request, held)


async def append(state: HttpState, request: Request) -> Response:
    """More instructions for an open program. The answer is its status; where they close it and
    nobody reads its events, its result or its events. Raises `HttpError` and `RametError`."""
    form = await read_form(request, AppendForm, state.limits.body_bytes)
    held = _found(state, request)
    held.feed(form.instructions or (), bool(form.closed))
    if not form.closed or held.reading:
        return json_answer(_shown(held))
    if form.stream:
        return await _streamed(request, held, owned=True)
    return await _whole(request, held)


async def events(state: HttpState, request: Request) -> Response:
    """The events of a program from where the last reader left off. One who goes away does not
    end the program: its lease does."""
    return await _streamed(request, _found(state, request), owned=False)


async def show(state: HttpState, request: Request) -> Response:
    """How a program is doing. Renews its lease."""
    held = _found(state, request)
    held.renew()
    return json_answer(_shown(held))


async def cancel(state: HttpState, request: Request) -> Response:
    """Abort a program. Returns when nothing of it runs any more."""
    held = _found(state, request)
    held.abort()
    await held.end()
    return json_answer({"id": held.rid, "object": "program", "deleted": True})


def _found(state: HttpState, request: Request) -> HeldProgram:
    name = request.path_params["id"]
    held = state.find(name)
    if not isinstance(held, HeldProgram):
        raise HttpError(404, f"no program {cut(name)!r} runs; it may have ended", param="id")
    return held


def _shown(held: HeldProgram) -> dict[str, Any]:
    return {"id": held.rid, "object": "program", "status": held.status, "lease": held.lease}


async def _streamed(request: Request, held: HeldProgram, owned: bool) -> Response:
    return Events(await opened(request, _told(held, owned)), {"X-Request-Id": held.rid})


async def _told(held: HeldProgram, owned: bool) -> AsyncGenerator[bytes, None]:
    """``owned``: when nobody reads this any more, the program ends."""
    held.claim()
    try:
        async with contextlib.aclosing(held.batches()) as batches:
            yield event({"type": "opened", **_shown(held)})
            async for batch in batches:
                yield b"".join(map(event, batch))
    finally:
        held.release()
        if owned:
            await held.end()


async def _whole(request: Request, held: HeldProgram) -> Response:
    held.claim()
    try:
        found = await while_connected(request, held.all())
    finally:
        held.release()
        await held.end()
    return json_answer(_result(held, found), headers={"X-Request-Id": held.rid})


def _result(held: HeldProgram, found: list[Event]) -> dict[str, Any]:
    """Raises `HttpError` for what ended the whole program, and for a program that failed before
    it had a single value."""
    values: dict[str, Any] = {}
    error, empty = None, True
    for item in found:
        if isinstance(item, Value):
            empty = False
            if item.stream == ROOT and item.name is not None and item.value is not None:
                values[item.name] = item.value
        elif isinstance(item, Failed):
            error = error or item.error
        elif isinstance(item, Done) and item.error is not None:
            raise HttpError.of(item.error.exception())
    if error is not None and empty:
        raise HttpError.of(error.exception())
    return {
        "id": held.rid,
        "object": "program",
        "model": held.model,
        "status": "completed" if error is None else "failed",
        "error": None if error is None else HttpError.of(error.exception()).body["error"],
        "values": values,
        "events": found,
    }
