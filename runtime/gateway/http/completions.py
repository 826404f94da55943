"""``/v1/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...protocol.messages import Generated
from ...protocol.meta import MetaInfo
from .answers import Events, event, json_answer, while_connected
from .forms import CompletionForm
from .opening import opened, sampling_of
from .prompts import ids_of_prompt
from .reading import read_form
from .run import Run
from .shapes import (
    completion_logprobs,
    ending,
    explained,
    matched_text,
    new_id,
    prompt_logprobs,
    top_of,
    usage,
    usage_of,
)
from .state import HttpState, Live


async def completions(state: HttpState, request: Request) -> Response:
    """Raises `HttpError` and `RametError`."""
    form = await read_form(request, CompletionForm, state.limits.body_bytes)
    live = state.need_model(form.model)
    form.check()
    if form.max_tokens is None:
        form.max_tokens = 16
    prompts = form.prompts()
    sampling = sampling_of(live, form)
    start = form.add_special_tokens is not False
    ids = [await ids_of_prompt(live.executor, prompt, start=start) for prompt in prompts]
    rid = new_id("cmpl", request, form.request_id)
    samplings = [sampling] * len(ids)
    run = Run(state, live, rid, ids, samplings, form.cache_salt, explain=form.explain)
    decode = live.executor.tokenizer.decode
    texts = [p if isinstance(p, str) else decode(p, skip_special=False) for p in prompts]
    answer = _Answer(state, live, form, rid, texts)
    if form.stream:
        return Events(await opened(request, answer.events(run)), {"X-Request-Id": rid})
    results = await while_connected(request, run.whole())
    return json_answer(answer.whole(results), headers={"X-Request-Id": rid})


class _Answer:
    """Shapes results of one request. ``texts`` are the prompts."""

    def __init__(
        self, state: HttpState, live: Live, form: CompletionForm, rid: str, texts: list[str]
    ) -> None:
        self._form = form
        self._tokenizer = live.executor.tokenizer
        self._texts = texts
        self._n = form.n or 1
        self._head = {
            "id": rid,
            "object": "text_completion",
            "created": state.now(),
            "model": live.model,
        }

    def whole(self, results: list[Generated]) -> dict[str, Any]:
        choices = [
            self._choice(number, sample, result)
            for number, result in enumerate(results)
            for sample in range(self._n)
        ]
        metas = [result.metas for result in results]
        return {**self._head, "choices": choices, "usage": usage(metas)}

    def _choice(self, number: int, sample: int, result: Generated) -> dict[str, Any]:
        form, meta = self._form, result.metas[sample]
        text = result.texts[sample]
        if form.include_stop_str_in_output:
            text += matched_text(meta, self._tokenizer)
        logprobs = None
        if form.logprobs is not None:
            logprobs = self._logprobs(meta)
        choice: dict[str, Any] = {
            "index": number * self._n + sample,
            "text": self._texts[number] + text if form.echo else text,
            "logprobs": logprobs,
            **ending(meta, self._tokenizer.eos_ids),
        }
        if form.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(meta, form.prompt_logprobs)
        choice |= explained(meta)
        if form.return_token_ids:
            choice["token_ids"] = result.output_ids[sample]
        return choice

    def _logprobs(self, meta: MetaInfo, offset: int = 0) -> dict[str, Any]:
        count = self._form.logprobs
        entries = meta.output_token_logprobs or []
        tops = list(top_of(meta.output_top_logprobs, count) or [None] * len(entries))
        if self._form.echo:
            before = meta.input_token_logprobs or []
            tops = [*(top_of(meta.input_top_logprobs, count) or [None] * len(before)), *tops]
            entries = [*before, *entries]
        return completion_logprobs(entries, tops, offset)

    # --- piece by piece ---

    async def events(self, run: Run) -> AsyncGenerator[bytes, None]:
        ended: dict[int, list[MetaInfo]] = {}
        made = [0] * (len(self._texts) * self._n)
        offsets = [0] * len(made)
        begun = [not self._form.echo] * len(made)
        pieces = run.pieces()
        try:
            async for batch in pieces:
                data = b""
                for number, piece in batch:
                    if piece.done:
                        ended[number] = piece.metas
                    for sample in range(self._n):
                        if not (piece.done or piece.texts[sample] or piece.output_ids[sample]):
                            continue
                        index = number * self._n + sample
                        choice = self._piece(number, sample, piece, offsets)
                        if not begun[index]:
                            begun[index] = True
                            choice["text"] = self._texts[number] + choice["text"]
                            if piece.done and self._form.logprobs is not None:
                                choice["logprobs"] = self._logprobs(piece.metas[sample])
                        made[index] += len(piece.output_ids[sample])
                        data += self._event(choice, piece.metas[sample], made[index])
                if data:
                    yield data
        finally:
            await pieces.aclose()
        if self._form.include_usage:
            counts = usage(ended[number] for number in sorted(ended))
            yield event({**self._head, "choices": [], "usage": counts})

    def _piece(
        self, number: int, sample: int, piece: Generated, offsets: list[int]
    ) -> dict[str, Any]:
        index = number * self._n + sample
        meta, text = piece.metas[sample], piece.texts[sample]
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None}
        if piece.done:
            if self._form.include_stop_str_in_output:
                choice["text"] = matched_text(meta, self._tokenizer)
            choice |= ending(meta, self._tokenizer.eos_ids) | explained(meta)
            return choice
        choice |= {"finish_reason": None, "stop_reason": None}
        if self._form.logprobs is not None and meta.output_token_logprobs:
            shown = self._logprobs(meta, offsets[index])
            choice["logprobs"] = shown
            offsets[index] += sum(map(len, shown["tokens"]))
        if self._form.return_token_ids:
            choice["token_ids"] = piece.output_ids[sample]
        return choice

    def _event(self, choice: dict[str, Any], meta: MetaInfo, made: int) -> bytes:
        chunk = {**self._head, "choices": [choice]}
        if self._form.continuous_usage:
            chunk["usage"] = usage_of(meta.prompt_tokens, made)
        elif self._form.include_usage:
            chunk["usage"] = None
        return event(chunk)
