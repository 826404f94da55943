"""Parts that OpenAI's two kinds of completion share: usage, finish reasons, log-probs, ids."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request

from ...protocol.meta import LogprobEntry, MetaInfo
from ..logprobs import token_text
from ..tokenizer import Tokenizer
from .errors import bad

LEAST = -9999.0
_MOST_ID = 128

Tops = Sequence[list[LogprobEntry] | None] | None


def new_id(prefix: str, request: Request, given: str | None) -> str:
    """``prefix-…``, of the client's own id where it sent one."""
    own = given or request.headers.get("x-request-id")
    if own is None:
        return f"{prefix}-{secrets.token_hex(16)}"
    return f"{prefix}-{checked_id('request_id', own)}"


def checked_id(name: str, given: str) -> str:
    """The same id: one that fits into a header and into a line of a log. Raises `HttpError`."""
    if not 1 <= len(given) <= _MOST_ID or not (given.isascii() and given.isprintable()):
        raise bad(f"{name} must be 1 to {_MOST_ID} printable characters of ASCII", name)
    return given


def usage(metas: Iterable[Sequence[MetaInfo]]) -> dict[str, Any]:
    """Of prompts with their samples: a prompt counts once."""
    prompt = completion = cached = 0
    for samples in metas:
        prompt += samples[0].prompt_tokens
        cached += samples[0].cached_tokens
        completion += sum(sample.completion_tokens for sample in samples)
    return usage_of(prompt, completion, cached)


def usage_of(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    return counts


def ending(meta: MetaInfo, eos_ids: Sequence[int]) -> dict[str, Any]:
    """``finish_reason`` and ``stop_reason``: the stop string or id that the request asked for."""
    finish = meta.finish_reason
    assert finish is not None
    matched = finish.matched
    return {
        "finish_reason": finish.type,
        "stop_reason": None if isinstance(matched, int) and matched in eos_ids else matched,
    }


def explained(meta: MetaInfo) -> dict[str, Any]:
    """``explain``, where it was asked for: where the prompt left the cache."""
    return {} if meta.explain is None else {"explain": msgspec.to_builtins(meta.explain)}


def matched_text(meta: MetaInfo, tokenizer: Tokenizer) -> str:
    """What ended the text, for whoever wants it at the end."""
    matched = meta.finish_reason.matched if meta.finish_reason is not None else None
    if isinstance(matched, int):
        return "" if matched in tokenizer.eos_ids else token_text(tokenizer, matched)
    return matched or ""


def completion_logprobs(
    entries: Sequence[LogprobEntry], tops: Tops, offset: int = 0
) -> dict[str, Any]:
    """``offset``: characters of the text before the first entry."""
    tokens = [text or "" for _, _, text in entries]
    offsets: list[int] = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(value) for value, _, _ in entries],
        "top_logprobs": [
            _by_text(entry, tops[place] if tops is not None else None)
            for place, entry in enumerate(entries)
        ],
        "text_offset": offsets,
    }


def _by_text(entry: LogprobEntry, top: list[LogprobEntry] | None) -> dict[str, Any] | None:
    if entry[0] is None:
        return None
    found: dict[str, Any] = {}
    for value, _, text in top or ():
        found.setdefault(text or "", _finite(value))
    found.setdefault(entry[2] or "", _finite(entry[0]))
    return found


def chat_logprobs(
    entries: Sequence[LogprobEntry], tops: Tops, tokenizer: Tokenizer
) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    for place, entry in enumerate(entries):
        top = tops[place] if tops is not None else None
        shown = _chat_token(entry, tokenizer)
        shown["top_logprobs"] = [_chat_token(other, tokenizer) for other in top or ()]
        content.append(shown)
    return {"content": content, "refusal": None}


def _chat_token(entry: LogprobEntry, tokenizer: Tokenizer) -> dict[str, Any]:
    value, token, text = entry
    data = tokenizer.token_bytes(token) or (text or "").encode()
    return {"token": text or "", "logprob": _finite(value), "bytes": list(data)}


def prompt_logprobs(meta: MetaInfo, count: int) -> list[dict[str, Any] | None]:
    """One entry a prompt token, by token id; the first has none."""
    entries, tops = meta.input_token_logprobs or [], meta.input_top_logprobs
    found: list[dict[str, Any] | None] = []
    for place, (value, token, text) in enumerate(entries):
        if value is None:
            found.append(None)
            continue
        top = (tops[place] if tops is not None else None) or []
        shown: dict[str, Any] = {}
        for rank, (other, number, name) in enumerate(top[:count], 1):
            shown[str(number)] = {"logprob": _finite(other), "rank": rank, "decoded_token": name}
        shown.setdefault(
            str(token), {"logprob": _finite(value), "rank": None, "decoded_token": text}
        )
        found.append(shown)
    return found


def top_of(tops: Tops, count: int | None) -> Tops:
    """Not more than were asked for here; both kinds of log-probs are computed with one number."""
    if tops is None or not count:
        return None
    return [top[:count] if top is not None else None for top in tops]


def _finite(value: float | None) -> float | None:
    if value is None:
        return None
    return value if math.isfinite(value) and value > LEAST else LEAST
