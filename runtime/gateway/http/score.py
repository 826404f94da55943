"""``/v1/score``: how likely given tokens are to come next, in SGLang's form."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...protocol.errors import ContextLengthError
from ..executor import EngineExecutor
from ..request import IntArray
from ..token_trie import trie_of
from ..trie_scoring import TrieScoring
from .answers import json_answer, while_connected
from .errors import bad
from .prompts import ids_of_prompt
from .reading import read_form
from .shapes import new_id, usage_of
from .state import HttpState, Live
from .work import Work

_MOST_ITEMS = 2048
_NOT_THERE = (
    "score_extraction_token",
    "query_embed_overrides",
    "item_embed_overrides",
    "return_pooled_hidden_states",
)


class ScoreForm(msgspec.Struct, kw_only=True):
    """``query`` and each of ``items`` are put together to one prompt, as text or as ids. The labels
    are the same for all items, or a list for each."""

    query: str | list[int] | None = None
    items: str | list[str | list[int]] | None = None
    label_token_ids: list[int | list[int]] | None = None
    apply_softmax: bool | None = None
    item_first: bool | None = None
    model: str | None = None
    cache_salt: str | None = None
    priority: int | str | None = None
    request_id: str | None = None
    text_1: Any = None
    text_2: Any = None
    temperature: float | None = None
    score_extraction_token: Any = None
    query_embed_overrides: Any = None
    item_embed_overrides: Any = None
    return_pooled_hidden_states: Any = None

    def check(self) -> None:
        """Raises `HttpError` for what is not supported."""
        if self.text_1 is not None or self.text_2 is not None:
            raise bad(
                "text_1: comparing two texts needs an embedding model; give query, items and"
                " label_token_ids",
                "text_1",
            )
        if self.temperature not in (None, 1):
            raise bad("temperature: only 1 is supported", "temperature")
        for name in _NOT_THERE:
            if getattr(self, name) not in (None, False):
                raise bad(f"{name}: it is not supported", name)

    def prompts(self) -> list[str | list[int]]:
        """Raises `HttpError`."""
        query, items = self.query, self.items
        if query is None:
            raise bad("query is missing", "query")
        if not items:
            raise bad("items is missing or empty", "items")
        if isinstance(items, str):
            items = [items]
        if len(items) > _MOST_ITEMS:
            raise bad(f"at most {_MOST_ITEMS} items, not {len(items)}", "items")
        joined: list[str | list[int]] = []
        for item in items:
            if isinstance(query, str) and isinstance(item, str):
                joined.append(item + query if self.item_first else query + item)
            elif isinstance(query, list) and isinstance(item, list):
                joined.append([*item, *query] if self.item_first else [*query, *item])
            else:
                raise bad("items must be texts where query is one, and token ids else", "items")
        if not all(joined):
            raise bad("query and item are both empty", "items")
        return joined


async def score(state: HttpState, request: Request) -> Response:
    """For each item the probability of each label as the next token; with ``apply_softmax``
    among the labels alone. Raises `HttpError` and `RametError`."""
    form = await read_form(request, ScoreForm, state.limits.body_bytes)
    live = state.need_model(form.model)
    form.check()
    prompts = [await ids_of_prompt(live.executor, prompt) for prompt in form.prompts()]
    labels = _labels(form, live, len(prompts))
    count = sum(len(set(row)) for row in labels)
    if count > state.limits.samples:
        raise bad(f"items times labels is {count}, above {state.limits.samples}", "label_token_ids")
    rid = new_id("score", request, form.request_id)
    logprobs = await while_connected(
        request, _logprobs(state, live, rid, prompts, labels, form.cache_salt)
    )
    shape = _softmax if form.apply_softmax else _exp
    rows = [
        shape([known[label] for label in row]) for known, row in zip(logprobs, labels, strict=True)
    ]
    body = {
        "id": rid,
        "object": "scoring",
        "created": state.now(),
        "model": live.model,
        "scores": rows,
        "usage": usage_of(sum(map(len, prompts)), 0),
    }
    return json_answer(body, headers={"X-Request-Id": rid})


def _labels(form: ScoreForm, live: Live, items: int) -> list[list[int]]:
    """The labels of each item."""
    given = form.label_token_ids or []
    if not given:
        raise bad("label_token_ids is missing or empty", "label_token_ids")
    shared = [label for label in given if isinstance(label, int)]
    rows = [row for row in given if isinstance(row, list)]
    if shared and rows:
        raise bad("label_token_ids must be ids, or a list of them for each item", "label_token_ids")
    if rows and len(rows) != items:
        raise bad(f"label_token_ids: {len(rows)} lists for {items} items", "label_token_ids")
    if not all(rows):
        raise bad("label_token_ids: the list of an item is empty", "label_token_ids")
    size = live.executor.tokenizer.vocab_size
    for label in (label for row in rows or [shared] for label in row):
        if not 0 <= label < size:
            raise bad(f"label_token_ids: {label} is not in [0, {size})", "label_token_ids")
    return rows or [shared] * items


async def _logprobs(
    state: HttpState,
    live: Live,
    rid: str,
    prompts: list[IntArray],
    labels: list[list[int]],
    salt: str | None,
) -> list[dict[int, float]]:
    """Of each label after its prompt. A prompt is computed once for all its labels."""
    executor = live.executor
    for prompt in prompts:
        if len(prompt) >= executor.context_length:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens; the context holds "
                f"{executor.context_length}, a label included",
                param="query",
            )
    work: Work[dict[int, float]] = Work(rid)
    state.enter(work)
    try:
        work.begin(
            [
                _after(executor, prompt, list(dict.fromkeys(row)), next(state.numbers), salt)
                for prompt, row in zip(prompts, labels, strict=True)
            ]
        )
        return await work.results()
    finally:
        state.leave(work)


async def _after(
    executor: EngineExecutor, prompt: IntArray, labels: list[int], program: int, salt: str | None
) -> dict[int, float]:
    trie = trie_of([[label] for label in labels])
    scoring = TrieScoring(
        executor.engine, prompt, executor.room, namespace=executor.namespace(salt), program=program
    )
    values = (await scoring.run(trie)).values
    return {label: float(values[node]) for label, (node,) in zip(labels, trie.paths, strict=True)}


def _exp(row: list[float]) -> list[float]:
    return [math.exp(value) for value in row]


def _softmax(row: list[float]) -> list[float]:
    top = max(row)
    weights = [math.exp(value - top) if top > -math.inf else 1.0 for value in row]
    return [weight / math.fsum(weights) for weight in weights]
