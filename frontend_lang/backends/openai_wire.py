"""Sampling parameters to OpenAI's request fields, and replies to results."""

from __future__ import annotations

import time
from typing import Any

from ramet.runtime.program.executor import GenResult
from ramet.runtime.protocol import (
    BackendError,
    BadInputError,
    FinishReason,
    MetaInfo,
    SamplingParams,
)

from .openai_constraint import constraint_fields

DEFAULT_MAX_TOKENS = 1024
_DEFAULTS = SamplingParams()
_SAME = ("top_p", "n", "frequency_penalty", "presence_penalty", "seed")
_EXTENSIONS = {
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "min_new_tokens": "min_tokens",
    "ignore_eos": "ignore_eos",
    "stop_token_ids": "stop_token_ids",
    "skip_special_tokens": "skip_special_tokens",
}
"""Not in OpenAI's API, but known to most servers that speak it; sent only when they are set."""


def request_fields(sampling: SamplingParams, chat: bool) -> dict[str, Any]:
    """The fields of a request that come from sampling parameters. Raises `BadInputError` for one
    that such a server has no word for."""
    if sampling.heal:
        raise BadInputError(
            "heal needs a runtime: a server of OpenAI's protocol takes back no tokens", param="heal"
        )
    if sampling.explain:
        raise BadInputError(
            "explain needs a runtime: a server of OpenAI's protocol does not say what it caches",
            param="explain",
        )
    fields: dict[str, Any] = {"temperature": sampling.temperature}
    for ours, theirs in [*((name, name) for name in _SAME), *_EXTENSIONS.items()]:
        value = getattr(sampling, ours)
        if value != getattr(_DEFAULTS, ours):
            fields[theirs] = list(value) if isinstance(value, tuple) else value  # pyright: ignore
    if sampling.stop:
        fields["stop"] = list(sampling.stop)
    if sampling.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.max_new_tokens is not None:
        fields["max_tokens"] = sampling.max_new_tokens
    elif not chat:  # where the default is 16 tokens; that of chats is what the context leaves
        fields["max_tokens"] = DEFAULT_MAX_TOKENS
    if sampling.return_logprob:
        if chat:
            fields["logprobs"] = True
            if sampling.top_logprobs_num:
                fields["top_logprobs"] = sampling.top_logprobs_num
        else:
            fields["logprobs"] = sampling.top_logprobs_num
    if sampling.constraint is not None:
        fields |= constraint_fields(sampling.constraint, chat)
    return fields


class Sample:
    """One choice of a reply, put together from one piece or many."""

    def __init__(self) -> None:
        self.text = ""
        self.reason: FinishReason | None = None
        self.logprobs: list[tuple[float | None, int, str | None]] = []
        self.tops: list[list[tuple[float | None, int, str | None]] | None] = []

    def take(self, choice: dict[str, Any]) -> str:
        """Add a piece; returns its text."""
        message: dict[str, Any] = choice.get("delta") or choice.get("message") or {}
        text: str = choice.get("text", message.get("content")) or ""
        self.text += text
        self._logprobs(choice.get("logprobs") or {})
        reason = choice.get("finish_reason")
        if reason is not None:
            matched = choice.get("matched_stop", choice.get("stop_reason"))
            self.reason = _finish(reason, matched)
        return text

    def _logprobs(self, logprobs: dict[str, Any]) -> None:
        # Ids are not part of OpenAI's replies: -1 stands for an unknown one.
        for entry in logprobs.get("content") or ():
            self.logprobs.append((entry["logprob"], -1, entry["token"]))
            tops = entry.get("top_logprobs")
            if tops:
                self.tops.append([(top["logprob"], -1, top["token"]) for top in tops])
        values = logprobs.get("token_logprobs") or ()
        tokens = logprobs.get("tokens") or ()
        for value, token in zip(values, tokens):
            self.logprobs.append((value, -1, token))
        tables: list[dict[str, float] | None] = (values and logprobs.get("top_logprobs")) or []
        for top in tables:
            self.tops.append([(value, -1, token) for token, value in (top or {}).items()] or None)

    def result(self, request_id: str, usage: dict[str, Any], began: float) -> GenResult:
        details: dict[str, Any] = usage.get("prompt_tokens_details") or {}
        meta = MetaInfo(
            id=request_id,
            finish_reason=self.reason,
            prompt_tokens=usage.get("prompt_tokens") or 0,
            completion_tokens=usage.get("completion_tokens") or 0,
            cached_tokens=details.get("cached_tokens") or 0,
            e2e_latency=time.monotonic() - began,
            output_token_logprobs=self.logprobs or None,
            output_top_logprobs=self.tops or None,
        )
        return GenResult(self.text, meta)


def samples_of(reply: dict[str, Any], samples: list[Sample], url: str) -> str:
    """Add a reply, or a chunk of one, to the samples; returns the new text of the first."""
    new = ""
    choices: list[dict[str, Any]] = reply.get("choices") or []
    for choice in choices:
        index: int = choice.get("index", 0)
        if not 0 <= index < len(samples):
            raise BackendError(f"{url} answered with choice {index} of {len(samples)}")
        text = samples[index].take(choice)
        new += text if index == 0 else ""
    return new


def _finish(reason: str, matched: Any) -> FinishReason:
    if reason == "length":
        return FinishReason("length")
    if reason in ("stop", "eos", "end_turn"):
        return FinishReason("stop", matched if isinstance(matched, (str, int)) else None)
    return FinishReason("abort", message=reason)
