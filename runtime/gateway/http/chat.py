"""``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...protocol.messages import Generated
from ...protocol.meta import MetaInfo
from .answers import Events, event, json_answer, while_connected
from .forms import ChatForm
from .opening import opened, sampling_of
from .prompts import ids_of_messages
from .reading import read_form
from .run import Run
from .shapes import (
    chat_logprobs,
    ending,
    matched_text,
    new_id,
    prompt_logprobs,
    top_of,
    usage,
    usage_of,
)
from .state import HttpState, Live


async def chat_completions(state: HttpState, request: Request) -> Response:
    """Raises `HttpError` and `RametError`."""
    form = await read_form(request, ChatForm, state.limits.body_bytes)
    live = state.need_model(form.model)
    form.check()
    sampling = sampling_of(live, form)
    go_on = bool(form.continue_final_message)
    ids = await ids_of_messages(
        live.executor,
        form.messages,
        answer=form.add_generation_prompt is not False and not go_on,
        go_on=go_on,
    )
    rid = new_id("chatcmpl", request, form.request_id)
    run = Run(state, live, rid, [ids], [sampling], form.cache_salt)
    answer = _Answer(state, live, form, rid)
    if form.stream:
        return Events(await opened(request, answer.events(run)), {"X-Request-Id": rid})
    (result,) = await while_connected(request, run.whole())
    return json_answer(answer.whole(result), headers={"X-Request-Id": rid})


class _Answer:
    """Shapes results of one request."""

    def __init__(self, state: HttpState, live: Live, form: ChatForm, rid: str) -> None:
        self._form = form
        self._tokenizer = live.executor.tokenizer
        self._n = form.n or 1
        self._head = {
            "id": rid,
            "object": "chat.completion.chunk" if form.stream else "chat.completion",
            "created": state.now(),
            "model": live.model,
        }

    def whole(self, result: Generated) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for index, (text, meta) in enumerate(zip(result.texts, result.metas)):
            if self._form.include_stop_str_in_output:
                text += matched_text(meta, self._tokenizer)
            choice: dict[str, Any] = {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": self._logprobs(meta),
                **ending(meta, self._tokenizer.eos_ids),
            }
            if self._form.return_token_ids:
                choice["token_ids"] = result.output_ids[index]
            choices.append(choice)
        body = {**self._head, "choices": choices, "usage": usage([result.metas])}
        if self._form.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(result.metas[0], self._form.prompt_logprobs)
        return body

    def _logprobs(self, meta: MetaInfo) -> dict[str, Any] | None:
        if not self._form.logprobs:
            return None
        tops = top_of(meta.output_top_logprobs, self._form.top_logprobs)
        return chat_logprobs(meta.output_token_logprobs or [], tops, self._tokenizer)

    async def events(self, run: Run) -> AsyncGenerator[bytes, None]:
        ended: list[MetaInfo] = []
        made = [0] * self._n
        begun = [False] * self._n
        pieces = run.pieces()
        try:
            async for batch in pieces:
                data = b""
                for _, piece in batch:
                    if piece.done:
                        ended = piece.metas
                    for index in range(self._n):
                        if not (piece.done or piece.texts[index] or piece.output_ids[index]):
                            continue
                        meta = piece.metas[index]
                        if not begun[index]:
                            begun[index] = True
                            first = {"role": "assistant", "content": ""}
                            data += self._event(self._choice(index, first), meta, 0)
                        made[index] += len(piece.output_ids[index])
                        for choice in self._choices(index, piece):
                            data += self._event(choice, meta, made[index])
                if data:
                    yield data
        finally:
            await pieces.aclose()
        if self._form.include_usage:
            yield event({**self._head, "choices": [], "usage": usage([ended])})

    def _choices(self, index: int, piece: Generated) -> list[dict[str, Any]]:
        meta, text = piece.metas[index], piece.texts[index]
        if piece.done:
            tail = ""
            if self._form.include_stop_str_in_output:
                tail = matched_text(meta, self._tokenizer)
            choice = self._choice(index, {"content": tail} if tail else {})
            return [choice | ending(meta, self._tokenizer.eos_ids)]
        choice = self._choice(index, {"content": text})
        if meta.output_token_logprobs:
            choice["logprobs"] = self._logprobs(meta)
        if self._form.return_token_ids:
            choice["token_ids"] = piece.output_ids[index]
        return [choice]

    def _choice(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _event(self, choice: dict[str, Any], meta: MetaInfo, made: int) -> bytes:
        chunk = {**self._head, "choices": [choice]}
        if self._form.continuous_usage:
            chunk["usage"] = usage_of(meta.prompt_tokens, made)
        elif self._form.include_usage:
            chunk["usage"] = None
        return event(chunk)
