"""The bodies of requests, as types. What is optional may also be null."""

from __future__ import annotations

from typing import Any

import msgspec

from .constrained import constraint_of
from .errors import bad

MOST_LOGPROBS = 20
MOST_SAMPLES = 128
MOST_PROMPTS = 2048
MOST_BIAS = 100.0
MOST_BIASES = 1 << 16


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenAIForm(msgspec.Struct, kw_only=True):
    """What completions and chat completions have in common."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    jump_forward: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | str | None = None
    request_id: str | None = None

    def check(self) -> None:
        """Raises `HttpError` for what this form of request rules out."""
        if self.stream_options is not None and not self.stream:
            raise bad("stream_options needs stream: true", "stream_options")
        if self.n is not None and not 1 <= self.n <= MOST_SAMPLES:
            raise bad(f"n must be in [1, {MOST_SAMPLES}], not {self.n}", "n")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise bad(f"max_tokens must be at least 0, not {self.max_tokens}", "max_tokens")
        if self.temperature is not None and not 0 <= self.temperature <= 2:
            raise bad(f"temperature must be in [0, 2], not {self.temperature}", "temperature")
        if self.logit_bias and len(self.logit_bias) > MOST_BIASES:
            raise bad(f"logit_bias: at most {MOST_BIASES} tokens", "logit_bias")
        check_top("prompt_logprobs", self.prompt_logprobs)
        if self.prompt_logprobs is not None and self.stream:
            raise bad("prompt_logprobs cannot be streamed", "prompt_logprobs")

    def sampling(self) -> dict[str, Any]:
        """As sampling parameters; only what was given."""
        names = (
            "min_tokens", "n", "temperature", "top_p", "top_k", "min_p", "frequency_penalty",
            "presence_penalty", "repetition_penalty", "stop", "stop_token_ids", "ignore_eos",
            "skip_special_tokens", "jump_forward",
        )  # fmt: skip
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.seed is not None and self.seed != -1:
            given["seed"] = self.seed
        if self.max_tokens is not None:
            given["max_new_tokens"] = self.max_tokens
        if self.logit_bias:
            given["logit_bias"] = {k: _clamp(v) for k, v in self.logit_bias.items()}
        if self.prompt_logprobs is not None:
            given |= {"return_logprob": True, "logprob_start_len": 0}
        return given

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionForm(OpenAIForm, kw_only=True):
    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | None = None
    explain: bool | None = None
    echo: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        check_top("logprobs", self.logprobs)
        if self.max_tokens == 0 and not self.echo:
            raise bad("max_tokens: 0 needs echo: true", "max_tokens")

    def sampling(self) -> dict[str, Any]:
        given = super().sampling()
        if self.logprobs is not None:
            given["return_logprob"] = True
            if self.echo:
                given["logprob_start_len"] = 0
        given["top_logprobs_num"] = max(self.logprobs or 0, self.prompt_logprobs or 0)
        constraint = constraint_of(self.response_format, self.structured_outputs)
        if constraint is not None:
            given["constraint"] = msgspec.to_builtins(constraint)
        return given

    def prompts(self) -> list[str | list[int]]:
        """Raises `HttpError` when there is none, or too many."""
        prompt = self.prompt
        if prompt is None or prompt == [] or prompt == "":
            raise bad("prompt is missing or empty", "prompt")
        return as_prompts("prompt", prompt)


class ChatForm(OpenAIForm, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    explain: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    separate_reasoning: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None

    def check(self) -> None:
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        if self.max_tokens is not None and self.max_tokens < 1:
            raise bad(f"max_tokens must be at least 1, not {self.max_tokens}", "max_tokens")
        super().check()
        check_top("top_logprobs", self.top_logprobs)
        if self.top_logprobs and not self.logprobs:
            raise bad("top_logprobs needs logprobs: true", "top_logprobs")
        if self.echo:
            raise bad("echo: messages are not repeated", "echo")
        if self.continue_final_message and self.add_generation_prompt:
            raise bad(
                "continue_final_message and add_generation_prompt exclude each other",
                "continue_final_message",
            )

    def sampling(self) -> dict[str, Any]:
        given = super().sampling()
        if self.logprobs:
            given["return_logprob"] = True
        given["top_logprobs_num"] = max(self.top_logprobs or 0, self.prompt_logprobs or 0)
        return given

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the chat template gets beside the messages."""
        given = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            given.setdefault("reasoning_effort", self.reasoning_effort)
        return given


class NativeForm(msgspec.Struct, kw_only=True):
    """SGLang's ``/generate``."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    return_text_in_logprobs: bool | None = None
    explain: bool | None = None
    stream: bool | None = None
    cache_salt: str | None = None
    priority: int | str | None = None


class TokenizeForm(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeForm(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = None


class AbortForm(msgspec.Struct, kw_only=True):
    rid: str | None = None
    abort_all: bool | None = None


def as_prompts(name: str, given: str | list[Any]) -> list[str | list[int]]:
    """A text, texts, ids or lists of ids as a list of prompts. Raises `HttpError` for a mixture."""
    if isinstance(given, str) or all(isinstance(item, int) for item in given):
        return [given]
    if len({type(item) for item in given}) > 1:
        raise bad(f"{name} must be texts, token ids or lists of token ids, not a mixture", name)
    if len(given) > MOST_PROMPTS:
        raise bad(f"at most {MOST_PROMPTS} prompts, not {len(given)}", name)
    return list(given)


def check_top(name: str, value: int | None) -> None:
    """Raises `HttpError` for a number of top log-probs out of range."""
    if value is not None and not 0 <= value <= MOST_LOGPROBS:
        raise bad(f"{name} must be in [0, {MOST_LOGPROBS}], not {value}", name)


def _clamp(value: float) -> float:
    return max(-MOST_BIAS, min(MOST_BIAS, value))
