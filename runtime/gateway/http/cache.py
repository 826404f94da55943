"""``/v1/cache/explain`` and ``/v1/cache/tree``: what is cached, and why a prompt was not.

A caller is shown its own text only. What others have cached is for who holds the admin's key, and
where there is none, for nobody."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...protocol.messages import TreePage
from ..explanation import answered, between, explain, short
from .answers import json_answer
from .errors import HttpError, bad
from .guard import is_admin
from .prompts import ids_of_prompt
from .reading import convert, read_form
from .state import HttpState

_FIELDS = ("prompt", "other", "cache_salt", "model")
_CURSOR = re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})*")
_MOST_CURSOR = 32 << 10
USUAL_NODES = 100
MOST_NODES = 1000


class ExplainForm(msgspec.Struct, kw_only=True):
    """Prompts are texts or token ids."""

    prompt: str | list[int]
    other: str | list[int] | None = None
    cache_salt: str | None = None
    model: str | None = None


async def explain_prompt(state: HttpState, request: Request) -> Response:
    """One prompt against the cache, or against another prompt. Raises `HttpError`, `RametError`."""
    if request.method == "GET":
        given = request.query_params
        form = convert({name: given[name] for name in _FIELDS if name in given}, ExplainForm)
    else:
        form = await read_form(request, ExplainForm, state.limits.body_bytes)
    live = state.need_model(form.model)
    executor = live.executor
    if not form.prompt:
        raise bad("prompt is missing or empty", "prompt")
    ids = await ids_of_prompt(executor, form.prompt)
    if form.other is None:
        everywhere = _may_see_all(state, request)
        shown = await explain(executor, ids, form.cache_salt, everywhere=everywhere)
    else:
        if not form.other:
            raise bad("other is empty", "other")
        shown = between(executor, ids, await ids_of_prompt(executor, form.other))
    return json_answer({"object": "cache.explanation", "model": live.model, **shown})


async def tree(state: HttpState, request: Request) -> Response:
    """A page of the radix tree. Raises `HttpError`, `RametError`."""
    if not _may_see_all(state, request):
        raise HttpError(
            403, "the tree holds everybody's text: it takes the admin key (--admin-key)"
        )
    live = state.need()
    limit = _limit(request.query_params.get("limit"))
    after = _after(request.query_params.get("after"))
    data = await live.executor.engine.ask("tree", after=after, limit=limit)
    page = answered(data, TreePage)
    decode = live.executor.tokenizer.decode
    nodes: list[dict[str, Any]] = []
    for node in page.nodes:
        shown = msgspec.structs.asdict(node)
        shown["namespace"] = short(node.namespace)
        shown["text"] = decode(shown.pop("head"), skip_special=False)
        nodes.append(shown)
    following = None if page.next is None else ".".join(map(str, page.next))
    return json_answer({"object": "cache.tree", "data": nodes, "next": following})


def _may_see_all(state: HttpState, request: Request) -> bool:
    return bool(state.admin_key) and is_admin(state, request.scope["headers"])


def _limit(given: str | None) -> int:
    if given is None:
        return USUAL_NODES
    if not re.fullmatch(r"[0-9]{1,9}", given) or not 1 <= int(given) <= MOST_NODES:
        raise bad(f"limit must be in [1, {MOST_NODES}]", "limit")
    return int(given)


def _after(given: str | None) -> tuple[int, ...]:
    if not given:
        return ()
    if len(given) > _MOST_CURSOR or not _CURSOR.fullmatch(given):
        raise bad("after must be what next said", "after")
    return tuple(map(int, given.split(".")))
