"""What is known about one finished (or streaming) generation, beside its text."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

# (log-prob, token id, text or None); the first token of an input has no log-prob.
LogprobEntry = tuple[float | None, int, str | None]


class FinishReason(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a generation ended. ``matched`` is the stop string or the stop token's id."""

    type: Literal["stop", "length", "abort"]
    matched: str | int | None = None
    message: str | None = None


class ChoiceScore(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one choice of a `select` scored."""

    text: str
    input_token_logprobs: list[LogprobEntry]
    normalized_prompt_logprobs: float
    unconditional_token_logprobs: list[LogprobEntry] | None = None
    normalized_unconditional_prompt_logprobs: float | None = None


class Explanation(msgspec.Struct, frozen=True):
    """Where a prompt left the cached path: its first ``index`` tokens were cached (a little less
    may have been used: the last token of a prompt is always computed). ``before`` and ``after`` are
    the prompt's text on both sides, ``token`` its first token behind.

    ``reason``: the cached paths go on with other tokens (differs), or do not go on (ends); all of
    the prompt was there (whole); nothing is cached (empty), or ever (off). ``neighbour`` is the
    text of the cached path that is most like the prompt from there on, ``neighbour_token`` its
    first token, ``hits`` how often it was found; it is one of ``branches`` ways on."""

    index: int
    reason: Literal["differs", "ends", "whole", "empty", "off"]
    before: str
    after: str
    token: int | None = None
    neighbour: str | None = None
    neighbour_token: int | None = None
    branches: int = 0
    hits: int = 0


class MetaInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """``meta_info`` of a reply. Log-probs are natural, of the raw logits; token counts include the
    sampled stop token. ``latency`` and ``ttft`` are in seconds, as the gateway saw them."""

    id: str = ""
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    e2e_latency: float | None = None
    ttft: float | None = None
    input_token_logprobs: list[LogprobEntry] | None = None
    output_token_logprobs: list[LogprobEntry] | None = None
    input_top_logprobs: list[list[LogprobEntry] | None] | None = None
    output_top_logprobs: list[list[LogprobEntry] | None] | None = None
    choices: list[ChoiceScore] | None = None
    greedy_logprob_matrix: list[list[float]] | None = None
    explain: Explanation | None = None

    def as_dict(self) -> dict[str, Any]:
        """As plain data. ``finish_reason`` stays a dict; absent fields are left out. Of a select,
        also the per-choice lists under SGLang's names."""
        data: dict[str, Any] = msgspec.to_builtins(self, builtin_types=(tuple,))
        data.setdefault("cached_tokens", 0)
        data.setdefault("prompt_tokens", 0)
        data.setdefault("completion_tokens", 0)
        if self.choices is not None:
            data["choices"] = [choice.text for choice in self.choices]
            data["input_token_logprobs"] = [c.input_token_logprobs for c in self.choices]
            data["normalized_prompt_logprobs"] = [
                c.normalized_prompt_logprobs for c in self.choices
            ]
            if any(c.unconditional_token_logprobs is not None for c in self.choices):
                data["unconditional_token_logprobs"] = [
                    c.unconditional_token_logprobs for c in self.choices
                ]
                data["normalized_unconditional_prompt_logprobs"] = [
                    c.normalized_unconditional_prompt_logprobs for c in self.choices
                ]
        return data
