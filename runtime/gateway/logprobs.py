"""Log-probs as people read them: the engine's columns beside ids and text."""

from __future__ import annotations

import math

import numpy as np

from ..protocol.messages import TopLogprobs
from ..protocol.meta import LogprobEntry
from .request import EngineRequest
from .tokenizer import Tokenizer

Tops = list[list[LogprobEntry] | None]


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """What a token reads as by itself: a special one by its name."""
    data = tokenizer.token_bytes(token)
    if data or token not in tokenizer.special_ids:
        return data.decode("utf-8", "replace")
    return tokenizer.decode([token], skip_special=False)


def special_text(tokenizer: Tokenizer) -> dict[int, bytes]:
    """What each special token looks like where it is shown."""
    return {
        token: tokenizer.decode([token], skip_special=False).encode()
        for token in tokenizer.special_ids
    }


def _top(tokenizer: Tokenizer, top: TopLogprobs | None, count: int) -> list[LogprobEntry] | None:
    if top is None:
        return None
    ids = np.frombuffer(top.ids, np.int32)[:count].tolist()
    values = np.frombuffer(top.values, np.float32)[:count].tolist()
    return [(value, token, token_text(tokenizer, token)) for value, token in zip(values, ids)]


def output_entries(
    request: EngineRequest, tokenizer: Tokenizer, first: int = 0, last: int | None = None
) -> tuple[list[LogprobEntry], Tops | None]:
    """Entries of output tokens [first, last), and the most likely ones beside them when asked."""
    last = len(request.tokens) if last is None else last
    entries: list[LogprobEntry] = [
        (value, token, token_text(tokenizer, token))
        for value, token in zip(request.logprobs[first:last], request.tokens[first:last])
    ]
    count = request.sampling.top_logprobs
    if not count:
        return entries, None
    return entries, [_top(tokenizer, top, count) for top in request.tops[first:last]]


def prompt_entries(
    request: EngineRequest, tokenizer: Tokenizer, healed: int = 0
) -> tuple[list[LogprobEntry], Tops | None] | None:
    """Entries of the prompt from ``logprob_start`` on; ``None`` when not asked for. The first
    ``healed`` tokens of the output are the prompt's too.

    The first token of all has no log-prob: nothing comes before it.
    """
    start = request.sampling.logprob_start
    if start < 0:
        return None
    tokens = request.prompt[start:].tolist()
    values = prompt_values(request)
    entries: list[LogprobEntry] = [
        (value, token, token_text(tokenizer, token)) for value, token in zip(values, tokens)
    ]
    first = max(start - len(request.prompt), 0)
    more, more_tops = output_entries(request, tokenizer, first, max(healed, first))
    entries += more
    count = request.sampling.top_logprobs
    if not count:
        return entries, None
    tops = [
        _top(tokenizer, request.prompt_tops.get(start + offset), count)
        for offset in range(len(tokens))
    ]
    return entries, tops + (more_tops or [])


def prompt_values(request: EngineRequest) -> list[float | None]:
    """Log-probs of prompt tokens from ``logprob_start`` on, ``None`` for what has none."""
    start = request.sampling.logprob_start
    if request.prompt_logprobs is None:
        return [None] * (len(request.prompt) - start)
    values = request.prompt_logprobs[start:].tolist()
    return [None if math.isnan(value) else value for value in values]
