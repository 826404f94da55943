"""``/generate``: SGLang's own form."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...protocol.messages import Generated
from ...protocol.meta import MetaInfo
from ...protocol.sampling import ALIASES, FIELDS, sampling_from
from .answers import Events, event, json_answer, while_connected
from .constrained import of_sampling_params
from .errors import bad, cut
from .forms import NativeForm, as_prompts
from .opening import opened
from .prompts import ids_of_prompt
from .reading import read_form
from .refused import refuse
from .run import Run
from .shapes import checked_id
from .state import HttpState

_CONSTRAINTS = frozenset(("regex", "json_schema", "ebnf"))
_OWN = _CONSTRAINTS | {"heal"}
_HARMLESS = ("spaces_between_special_tokens", "stream_interval", "sampling_seed")


async def generate_native(state: HttpState, request: Request) -> Response:
    """Raises `HttpError` and `RametError`."""
    form = await read_form(request, NativeForm, state.limits.body_bytes)
    live = state.need()
    prompts, batched = _prompts(form)
    count = len(prompts)
    samplings = [_sampling(form, number, count) for number in range(count)]
    for sampling in samplings:
        sampling_from(sampling).check(live.executor.tokenizer.vocab_size)
    ids = [await ids_of_prompt(live.executor, prompt) for prompt in prompts]
    rids = _rids(form, count)
    apart = rids if isinstance(form.rid, list) else [rids[0]] * count
    run = Run(state, live, rids[0], ids, samplings, form.cache_salt, apart, form.explain)
    with_text = bool(form.return_text_in_logprobs)
    if form.stream:
        events = _events(run, rids, batched, with_text, [len(prompt) for prompt in ids])
        return Events(await opened(request, events), {})
    results = await while_connected(request, run.whole())
    answers = [
        _shape(result.texts[i], result.output_ids[i], result.metas[i], rids[number], with_text)
        for number, result in enumerate(results)
        for i in range(len(result.texts))
    ]
    return json_answer(answers if batched or len(answers) > 1 else answers[0])


def _prompts(form: NativeForm) -> tuple[list[str | list[int]], bool]:
    """The prompts, and whether they came as a list."""
    if (form.text is None) == (form.input_ids is None):
        raise bad("give either text or input_ids", "text")
    given: Any = form.text if form.text is not None else form.input_ids
    name = "text" if form.text is not None else "input_ids"
    if given == []:
        raise bad("the prompt is empty", name)
    batched = isinstance(given, list) and not isinstance(given[0], int)
    return as_prompts(name, given), batched


def _rids(form: NativeForm, count: int) -> list[str]:
    """One a prompt."""
    if form.rid is None or form.rid == "":
        rid = secrets.token_hex(16)
        return [rid] if count == 1 else [f"{rid}_{i}" for i in range(count)]
    if isinstance(form.rid, str):
        return [checked_id("rid", form.rid)] * count
    if len(form.rid) != count or len(set(form.rid)) != count:
        raise bad(f"rid must be {count} different ids, one a prompt", "rid")
    return [checked_id("rid", rid) for rid in form.rid]


def _sampling(form: NativeForm, number: int, count: int) -> dict[str, Any]:
    params = _at("sampling_params", form.sampling_params, number, count) or {}
    refuse(params, _OWN)
    given: dict[str, Any] = {}
    constraint = of_sampling_params(params)
    if constraint is not None:
        given["constraint"] = msgspec.to_builtins(constraint)
    for name, value in params.items():
        if name in _CONSTRAINTS:
            continue
        if name in FIELDS or name in ALIASES:
            given[name] = value
        elif value not in (None, False, "", []) and name not in _HARMLESS:
            raise bad(f"unknown sampling parameter {cut(name, 40)!r}", "sampling_params")
    for name in ("return_logprob", "logprob_start_len", "top_logprobs_num"):
        value = _at(name, getattr(form, name), number, count)
        if value is not None:
            given[name] = value
    most = given.get("max_new_tokens", given.get("max_tokens"))
    if given.get("return_logprob") and most == 0:  # of what, if not of the prompt?
        given.setdefault("logprob_start_len", 0)
    return given


def _at(name: str, value: Any, number: int, count: int) -> Any:
    if not isinstance(value, list):
        return value
    if len(value) != count:
        raise bad(f"{name}: {len(value)} values for {count} prompts", name)
    return value[number]


def _shape(
    text: str, ids: Sequence[int], meta: MetaInfo, rid: str, with_text: bool
) -> dict[str, Any]:
    info = msgspec.structs.replace(meta, id=rid).as_dict()
    finish = info.setdefault("finish_reason", None)
    if finish is not None and finish["type"] == "length":
        finish["length"] = meta.completion_tokens
    if "output_token_logprobs" in info:
        info.setdefault("input_token_logprobs", [])
    if not with_text:
        for name in ("input_token_logprobs", "output_token_logprobs"):
            if name in info:
                info[name] = [(value, token, None) for value, token, _ in info[name]]
        for name in ("input_top_logprobs", "output_top_logprobs"):
            if name in info:
                info[name] = [top and [(v, t, None) for v, t, _ in top] for top in info[name]]
    return {"text": text, "output_ids": list(ids), "meta_info": info}


async def _events(
    run: Run, rids: list[str], batched: bool, with_text: bool, lengths: list[int]
) -> AsyncGenerator[bytes, None]:
    """Each event holds all so far of one sample, as clients of this form expect."""
    so_far: dict[tuple[int, int], tuple[str, list[int], MetaInfo]] = {}
    pieces = run.pieces()
    try:
        async for batch in pieces:
            touched = _add(so_far, batch, lengths)
            data = b""
            for number, sample in touched:
                text, ids, meta = so_far[number, sample]
                shown = _shape(text, ids, meta, rids[number], with_text)
                samples = sum(key[0] == number for key in so_far)
                if batched or sample or samples > 1:
                    shown["index"] = number * samples + sample
                data += event(shown)
            if data:
                yield data
    finally:
        await pieces.aclose()


def _add(
    so_far: dict[tuple[int, int], tuple[str, list[int], MetaInfo]],
    batch: list[tuple[int, Generated]],
    lengths: list[int],
) -> list[tuple[int, int]]:
    """Enter pieces; returns which samples have something new to show, in order."""
    touched: dict[tuple[int, int], None] = {}
    for number, piece in batch:
        for sample, new in enumerate(piece.metas):
            key = number, sample
            text, ids, meta = so_far.get(key, ("", [], MetaInfo(prompt_tokens=lengths[number])))
            if piece.done:
                so_far[key] = text, ids, new
                touched[key] = None
                continue
            if piece.texts[sample] or piece.output_ids[sample]:
                touched[key] = None
            ids += piece.output_ids[sample]
            meta.completion_tokens = len(ids)
            if new.input_token_logprobs is not None:
                meta.input_token_logprobs = new.input_token_logprobs
                meta.input_top_logprobs = new.input_top_logprobs
            if new.output_token_logprobs:
                meta.output_token_logprobs = [
                    *(meta.output_token_logprobs or []), *new.output_token_logprobs
                ]  # fmt: skip
            so_far[key] = text + piece.texts[sample], ids, meta
    return list(touched)
