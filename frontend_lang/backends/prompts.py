"""The arguments of `generate` as one checked message a prompt."""

from __future__ import annotations

import secrets
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
from ramet.runtime.protocol import BadInputError, ErrorInfo, sampling_from
from ramet.runtime.protocol.messages import Generate, Generated

OnGenerated = Callable[[Generated | ErrorInfo], object]


class Jobs(msgspec.Struct):
    """The requests of one call; ``waiting`` are those that were sent, with who is told of them."""

    messages: list[Generate]
    many: bool
    waiting: dict[str, OnGenerated] = {}


def jobs_for(
    prompt: str | Sequence[str] | None,
    input_ids: Sequence[int] | Sequence[Sequence[int]] | None,
    sampling_params: dict[str, Any] | Sequence[dict[str, Any]] | None,
    return_logprob: bool,
    logprob_start_len: int,
    top_logprobs_num: int,
    stream: bool,
    rid: str | Sequence[str] | None,
    cache_salt: str | None,
    explain: bool = False,
) -> Jobs:
    """One message a prompt, checked. Raises `BadInputError` naming what was wrong."""
    prompts, many = _prompts(prompt, input_ids)
    samplings = _spread(sampling_params, len(prompts), "sampling_params", dict)
    rids = _spread(rid, len(prompts), "rid", str)
    if many and isinstance(rid, str):
        raise BadInputError("a list of prompts needs a list of rids", param="rid")
    if not isinstance(stream, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BadInputError(f"stream must be True or False, not {stream!r}", param="stream")
    if cache_salt is not None and not isinstance(cache_salt, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BadInputError(f"cache_salt must be a string, not {cache_salt!r}", param="cache_salt")
    if not isinstance(explain, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BadInputError(f"explain must be True or False, not {explain!r}", param="explain")
    extra: dict[str, Any] = {}
    if return_logprob or top_logprobs_num:
        extra["return_logprob"] = True
        extra["logprob_start_len"] = logprob_start_len
        extra["top_logprobs_num"] = top_logprobs_num
    messages: list[Generate] = []
    for given, sampling, name in zip(prompts, samplings, rids):
        own: dict[str, Any] = dict(sampling or {})
        merged = {**extra, **{k: v for k, v in own.items() if v is not None}}
        sampling_from(merged)
        messages.append(
            Generate(
                rid=name if name is not None else secrets.token_hex(12),
                prompt=given if isinstance(given, str) else None,
                input_ids=None if isinstance(given, str) else given,
                sampling=merged,
                stream=stream,
                cache_salt=cache_salt,
                explain=explain,
            )
        )
    if len({message.rid for message in messages}) < len(messages):
        raise BadInputError("the same rid is given twice", param="rid")
    return Jobs(messages, many)


def _prompts(prompt: Any, input_ids: Any) -> tuple[list[str | bytes], bool]:
    if (prompt is None) == (input_ids is None):
        raise BadInputError("give either prompt or input_ids", param="prompt")
    if prompt is not None:
        if isinstance(prompt, str):
            return [prompt], False
        if not isinstance(prompt, Sequence) or not all(isinstance(text, str) for text in prompt):  # pyright: ignore
            raise BadInputError("prompt must be a string or a list of strings", param="prompt")
        return list(cast("Sequence[str]", prompt)), True
    try:
        rows = list(input_ids)
        if rows and not hasattr(rows[0], "__len__"):
            return [_packed(rows)], False
        if not rows:
            raise BadInputError("input_ids is empty", param="input_ids")
        return [_packed(row) for row in rows], True
    except OverflowError:
        raise BadInputError("input_ids: an id does not fit 32 bits", param="input_ids") from None
    except TypeError:
        raise BadInputError(
            "input_ids must be a list of token ids or a list of such lists", param="input_ids"
        ) from None


def _packed(row: Any) -> bytes:
    """Token ids as little-endian int32. Raises TypeError, OverflowError."""
    if isinstance(row, (str, bytes)):
        raise TypeError
    ids = array("i", row)
    if sys.byteorder != "little":
        ids.byteswap()
    return ids.tobytes()


def _spread(value: Any, count: int, name: str, one: type) -> list[Any]:
    """A value for each prompt, from one for all or a list with one each."""
    if value is None or isinstance(value, one):
        return [value] * count
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise BadInputError(f"{name} must be a {one.__name__} or a list, not {value!r}", param=name)
    values = list(cast("Sequence[Any]", value))
    for item in values:
        if item is not None and not isinstance(item, one):
            raise BadInputError(
                f"{name} must hold a {one.__name__} for each prompt, not {item!r}", param=name
            )
    if len(values) != count:
        raise BadInputError(f"{len(values)} {name} for {count} prompts", param=name)
    return values
