"""``/v1/responses``: made, read again, gone on from, cancelled, forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ....protocol.errors import RametError
from ..answers import Events, json_answer, while_connected
from ..asked import Asked, ask
from ..errors import HttpError, bad, cut
from ..opening import opened, sampling_of, with_room
from ..reading import read_form
from ..run import Run
from ..shapes import new_id
from ..state import HttpState, Live
from .answer import Answer, Body, head_of
from .form import ResponseForm
from .items import items_of, messages_of
from .store import Stored

log = logging.getLogger(__name__)

_RUNNING = ("queued", "in_progress")
_ABORT_S = 2.0


async def create(state: HttpState, request: Request) -> Response:
    """Raises `HttpError` and `RametError`."""
    form = await read_form(request, ResponseForm, state.limits.body_bytes)
    live = state.need_model(form.model)
    form.check()
    sampling = sampling_of(live, form)
    items, asked = await _ask(state, live, form)
    rid = "resp_" + new_id("resp", request, form.request_id).removeprefix("resp-")
    if state.responses.get(rid) is not None:
        raise bad(f"there is a response {cut(rid)!r} already", "request_id")
    samplings = [with_room(live, sampling | asked.sampling, len(asked.ids))]
    run = Run(state, live, rid, [asked.ids], samplings, form.cache_salt, explain=form.explain)

    def keep(body: Body) -> None:
        if form.store is not False:
            state.responses.put(body, items)

    head = head_of(form, rid, live.model, sampling, state.now())
    answer = Answer(form, head, live.executor.tokenizer, asked.voice, keep)
    headers = {"X-Request-Id": rid}
    if form.stream:
        return Events(await opened(request, answer.events(run, state.now)), headers, b"")
    if form.background:
        body = answer.begun("queued")
        state.spawn(_in_background(state, run, answer))
        return json_answer(body, headers=headers)
    (result,) = await while_connected(request, run.whole())
    return json_answer(answer.whole(result, state.now()), headers=headers)


async def count(state: HttpState, request: Request) -> Response:
    """How many tokens the prompt of such a response would have."""
    form = await read_form(request, ResponseForm, state.limits.body_bytes)
    live = state.need_model(form.model)
    form.check()
    _, asked = await _ask(state, live, form)
    return json_answer({"object": "response.input_tokens", "input_tokens": len(asked.ids)})


async def _ask(
    state: HttpState, live: Live, form: ResponseForm
) -> tuple[list[dict[str, Any]], Asked]:
    """The items of the conversation, and what they ask of the model."""
    items = [*_before(state, form), *items_of(form.input)]
    asked = await ask(
        live,
        messages_of(form.instructions, items),
        offer=form.offer,
        constraint=form.constraint,
        variables=form.template_variables,
    )
    return items, asked


async def _in_background(state: HttpState, run: Run, answer: Answer) -> None:
    try:
        (result,) = await run.whole()
        answer.whole(result, state.now())
    except Exception as error:
        if not isinstance(error, (HttpError, RametError)):
            log.exception("a response broke")
        answer.failed(error, state.now())


async def show(state: HttpState, request: Request) -> Response:
    """A stored response. Raises `HttpError`."""
    if request.query_params.get("stream") in ("true", "True", "1"):
        raise bad("stream: a stored response is not streamed", "stream")
    return json_answer(_found(state, request.path_params["id"]).body)


async def input_items(state: HttpState, request: Request) -> Response:
    """What a stored response was made from: the conversation before it and its input."""
    stored = _found(state, request.path_params["id"])
    rid = stored.body["id"]
    shown = [{"id": f"{rid}_{place}", **item} for place, item in enumerate(stored.items)]
    if request.query_params.get("order", "desc") != "asc":
        shown.reverse()
    first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return json_answer(
        {"object": "list", "data": shown, "first_id": first, "last_id": last, "has_more": False}
    )


async def delete(state: HttpState, request: Request) -> Response:
    """Forget a response; one that still runs is aborted."""
    name = _found(state, request.path_params["id"]).body["id"]
    await _abort(state, name)
    state.responses.drop(name)
    return json_answer({"id": name, "object": "response", "deleted": True})


async def cancel(state: HttpState, request: Request) -> Response:
    """Abort a response that runs. Raises `HttpError` for one that has ended."""
    stored = _found(state, request.path_params["id"])
    name, status = stored.body["id"], stored.body["status"]
    if status not in _RUNNING:
        raise bad(f"response {cut(name)!r} has ended: it is {status}", "id")
    await _abort(state, name)
    return json_answer({**_found(state, name).body, "status": "cancelled"})


async def _abort(state: HttpState, name: str) -> None:
    """Returns when it has said that it ended, or when whoever reads it takes too long."""
    if (run := state.find(name)) is None:
        return
    run.abort()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_ABORT_S):
            while state.find(name) is run or _found(state, name).body["status"] in _RUNNING:
                await asyncio.sleep(0.002)


def _before(state: HttpState, form: ResponseForm) -> list[dict[str, Any]]:
    if form.previous_response_id is None:
        return []
    name = form.previous_response_id
    stored = state.responses.get(name)
    if stored is None:
        raise HttpError(404, f"no response {cut(name)!r} is stored", param="previous_response_id")
    if stored.body["status"] in _RUNNING:
        raise bad(f"response {cut(name)!r} has not ended", "previous_response_id")
    return stored.conversation


def _found(state: HttpState, name: str) -> Stored:
    stored = state.responses.get(name)
    if stored is None:
        raise HttpError(404, f"no response {cut(name)!r} is stored", param="id")
    return stored
