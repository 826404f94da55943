"""The answer to a chat: its choices, whole or as they grow."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ...protocol.messages import Generated
from ...protocol.meta import MetaInfo
from .answers import event
from .forms import ChatForm
from .run import Run
from .shapes import (
    chat_logprobs,
    ending,
    explained,
    matched_text,
    prompt_logprobs,
    top_of,
    usage,
    usage_of,
)
from .spoken import Speech, Spoken, Thought, heard
from .state import HttpState, Live
from .tools.events import CallBegin, Content
from .voice import Voice


class ChatAnswer:
    """Shapes results of one request. ``voice`` says how its texts are read."""

    def __init__(
        self, state: HttpState, live: Live, form: ChatForm, rid: str, voice: Voice
    ) -> None:
        self._form = form
        self._voice = voice
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
            speech = self._voice.speech()
            choice: dict[str, Any] = {
                "index": index,
                "message": self._message(speech, text),
                "logprobs": self._logprobs(meta),
                **self._ending(meta, speech),
                **explained(meta),
            }
            if self._form.return_token_ids:
                choice["token_ids"] = result.output_ids[index]
            choices.append(choice)
        body = {**self._head, "choices": choices, "usage": usage([result.metas])}
        if self._form.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(result.metas[0], self._form.prompt_logprobs)
        return body

    def _message(self, speech: Speech, text: str) -> dict[str, Any]:
        said = heard(speech, text)
        message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
        if self._shows_thoughts:
            message["reasoning_content"] = said.thought or None
        if said.calls:
            message["content"] = said.content or None
            message["tool_calls"] = [
                {
                    "id": self._voice.new_call_id(),
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                for name, arguments in said.calls
            ]
        return message

    @property
    def _shows_thoughts(self) -> bool:
        return self._voice.tags is not None and self._form.include_reasoning is not False

    def _ending(self, meta: MetaInfo, speech: Speech) -> dict[str, Any]:
        end = ending(meta, self._tokenizer.eos_ids)
        if speech.called and end["finish_reason"] == "stop":
            end["finish_reason"] = "tool_calls"
        return end

    def _logprobs(self, meta: MetaInfo) -> dict[str, Any] | None:
        if not self._form.logprobs:
            return None
        tops = top_of(meta.output_top_logprobs, self._form.top_logprobs)
        return chat_logprobs(meta.output_token_logprobs or [], tops, self._tokenizer)

    # --- piece by piece ---

    async def events(self, run: Run) -> AsyncGenerator[bytes, None]:
        ended: list[MetaInfo] = []
        made = [0] * self._n
        speeches: list[Speech | None] = [None] * self._n
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
                        speech = speeches[index]
                        if speech is None:
                            speech = speeches[index] = self._voice.speech()
                            first = {"role": "assistant", "content": ""}
                            data += self._event(self._choice(index, first), meta, 0)
                        made[index] += len(piece.output_ids[index])
                        for choice in self._choices(index, piece, speech):
                            data += self._event(choice, meta, made[index])
                if data:
                    yield data
        finally:
            await pieces.aclose()
        if self._form.include_usage:
            yield event({**self._head, "choices": [], "usage": usage([ended])})

    def _choices(self, index: int, piece: Generated, speech: Speech) -> list[dict[str, Any]]:
        meta = piece.metas[index]
        if piece.done:
            said: list[Spoken] = []
            if self._form.include_stop_str_in_output:
                said += speech.push(matched_text(meta, self._tokenizer))
            said += speech.finish()
            choices = [self._choice(index, delta) for delta in self._deltas(said)]
            return [
                *choices,
                self._choice(index, {}) | self._ending(meta, speech) | explained(meta),
            ]
        deltas = self._deltas(speech.push(piece.texts[index]))
        logprobs = self._logprobs(meta) if meta.output_token_logprobs else None
        if not deltas and (logprobs or self._form.return_token_ids or self._form.continuous_usage):
            deltas = [{}]
        choices = [self._choice(index, delta) for delta in deltas]
        if choices:
            choices[0]["logprobs"] = logprobs
            if self._form.return_token_ids:
                choices[0]["token_ids"] = piece.output_ids[index]
        return choices

    def _deltas(self, said: Sequence[Spoken]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for item in said:
            if isinstance(item, Content):
                deltas.append({"content": item.text})
            elif isinstance(item, Thought):
                if self._shows_thoughts:
                    deltas.append({"reasoning_content": item.text})
            elif isinstance(item, CallBegin):
                call: dict[str, Any] = {
                    "index": item.index,
                    "id": self._voice.new_call_id(),
                    "type": "function",
                    "function": {"name": item.name, "arguments": ""},
                }
                deltas.append({"tool_calls": [call]})
            else:
                call = {"index": item.index, "function": {"arguments": item.text}}
                deltas.append({"tool_calls": [call]})
        return deltas

    def _choice(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _event(self, choice: dict[str, Any], meta: MetaInfo, made: int) -> bytes:
        chunk = {**self._head, "choices": [choice]}
        if self._form.continuous_usage:
            chunk["usage"] = usage_of(meta.prompt_tokens, made)
        elif self._form.include_usage:
            chunk["usage"] = None
        return event(chunk)
