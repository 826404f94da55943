"""One response: its body, whole or as it grows, and the events of a stream of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec

from ....protocol.errors import AbortedError
from ....protocol.messages import Generated
from ....protocol.meta import MetaInfo
from ...tokenizer import Tokenizer
from ..errors import HttpError
from ..run import Run
from ..shapes import chat_logprobs, explained, matched_text, top_of
from ..voice import Voice
from .form import ResponseForm
from .output import Output

_encode = msgspec.json.Encoder().encode
Body = dict[str, Any]
Keep = Callable[[Body], None]
"""Told of the response whenever its status changes."""


class Answer:
    """Grows one response from pieces of a generation."""

    def __init__(
        self,
        form: ResponseForm,
        head: Body,
        tokenizer: Tokenizer,
        voice: Voice,
        keep: Keep,
    ) -> None:
        self._form = form
        self._head = head
        self._tokenizer = tokenizer
        self._speech = voice.speech()
        self._keep = keep
        self._output = Output(voice.new_call_id)
        self._numbered = 0
        self._over = False

    def begun(self, status: str = "in_progress") -> Body:
        """The response before there is any of it."""
        body = self._body(status)
        self._keep(body)
        return body

    def whole(self, result: Generated, now: float) -> Body:
        """The response to a generation that did not stream."""
        self._take(result.texts[0], result.metas[0])
        self._finish(result.metas[0])
        return self._ended(result.metas[0], now)

    def failed(self, error: BaseException, now: float) -> Body:
        """The response that did not come to its end."""
        known = HttpError.of(error)
        code = {429: "rate_limit_exceeded", 400: "invalid_prompt"}.get(known.status, "server_error")
        status = "cancelled" if known.status == 499 else "failed"
        told = {"code": code, "message": known.body["error"]["message"]}
        body = self._body(status, error=None if status == "cancelled" else told, completed_at=now)
        if not self._over:
            self._over = True
            self._keep(body)
        return body

    async def events(self, run: Run, clock: Callable[[], float]) -> AsyncGenerator[bytes, None]:
        """What fails before the first piece is raised; later it is an event."""
        begun = False
        pieces = run.pieces()
        try:
            async for batch in pieces:
                data = b""
                if not begun:
                    begun = True
                    body = self.begun()
                    for kind in ("created", "in_progress"):
                        data += self._event({"type": f"response.{kind}", "response": body})
                for _, piece in batch:
                    data += self._piece(piece, clock)
                if data:
                    yield data
        except Exception as error:
            body = self.failed(error, clock())
            if not begun:
                raise
            yield self._event({"type": "response.failed", "response": body})
        except BaseException:  # its reader went away
            self.failed(AbortedError("the client went away"), clock())
            raise
        finally:
            await pieces.aclose()

    def _piece(self, piece: Generated, clock: Callable[[], float]) -> bytes:
        meta = piece.metas[0]
        found = self._take(piece.texts[0], meta) if not piece.done else []
        if piece.done:
            found += self._finish(meta)
            body = self._ended(meta, clock())
            found.append({"type": f"response.{body['status']}", "response": body})
        return b"".join(map(self._event, found))

    def _take(self, text: str, meta: MetaInfo) -> list[dict[str, Any]]:
        logprobs: list[dict[str, Any]] = []
        if self._form.logprobs and meta.output_token_logprobs:
            tops = top_of(meta.output_top_logprobs, self._form.top_logprobs)
            logprobs = chat_logprobs(meta.output_token_logprobs, tops, self._tokenizer)["content"]
        return self._output.push(self._speech.push(text), logprobs)

    def _finish(self, meta: MetaInfo) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if self._form.include_stop_str_in_output:
            found += self._output.push(self._speech.push(matched_text(meta, self._tokenizer)))
        found += self._output.push(self._speech.finish())
        return found + self._output.finish(_status(meta))

    def _ended(self, meta: MetaInfo, now: float) -> Body:
        status = _status(meta)
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        body = self._body(
            status,
            output=self._output.items,
            incomplete_details=cut,
            usage=self._usage(meta),
            completed_at=now,
            **explained(meta),
        )
        self._over = True
        self._keep(body)
        return body

    def _usage(self, meta: MetaInfo) -> dict[str, Any]:
        """Tokens of the thinking are counted by cutting its text anew."""
        thought = self._output.thought
        thinking = len(self._tokenizer.encode(thought)) if thought else 0
        details = {"cached_tokens": meta.cached_tokens, "cache_write_tokens": 0}
        return {
            "input_tokens": meta.prompt_tokens,
            "input_tokens_details": details,
            "output_tokens": meta.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": min(thinking, meta.completion_tokens)},
            "total_tokens": meta.prompt_tokens + meta.completion_tokens,
        }

    def _body(self, status: str, **fields: Any) -> Body:
        return {**self._head, "status": status, **fields}

    def _event(self, event: dict[str, Any]) -> bytes:
        event = {**event, "sequence_number": self._numbered}
        self._numbered += 1
        return b"event: " + event["type"].encode() + b"\ndata: " + _encode(event) + b"\n\n"


def _status(meta: MetaInfo) -> str:
    finish = meta.finish_reason
    return "incomplete" if finish is not None and finish.type == "length" else "completed"


def head_of(form: ResponseForm, rid: str, model: str, sampling: dict[str, Any], now: float) -> Body:
    """What of a response is known before it begins."""
    return {
        "id": rid,
        "object": "response",
        "created_at": now,
        "completed_at": None,
        "status": "queued",
        "background": bool(form.background),
        "error": None,
        "incomplete_details": None,
        "instructions": form.instructions,
        "max_output_tokens": form.max_tokens,
        "max_tool_calls": None,
        "model": model,
        "output": [],
        "parallel_tool_calls": form.parallel_tool_calls is not False,
        "previous_response_id": form.previous_response_id,
        "reasoning": {"effort": (form.reasoning or {}).get("effort"), "summary": None},
        "service_tier": "default",
        "store": form.store is not False,
        "temperature": sampling.get("temperature", 1.0),
        "text": {"format": form.format},
        "tool_choice": form.tool_choice or "auto",
        "tools": form.tools or [],
        "top_logprobs": form.top_logprobs or 0,
        "top_p": sampling.get("top_p", 1.0),
        "truncation": "disabled",
        "usage": None,
        "user": form.user,
        "metadata": form.metadata or {},
    }
