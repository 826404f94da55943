"""How a request of either OpenAI kind begins: its sampling parameters, its first events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request

from ...protocol.errors import BadInputError
from ...protocol.sampling import sampling_from
from .answers import while_connected
from .forms import OpenAIForm
from .state import Live


def sampling_of(live: Live, form: OpenAIForm) -> dict[str, Any]:
    """The request's parameters over the model's defaults. Raises `BadInputError`."""
    given = form.sampling()
    merged = {**live.defaults, **given}
    try:
        sampling_from(merged).check(live.executor.tokenizer.vocab_size)
    except BadInputError as error:
        raise BadInputError(
            _theirs(error.message), param=_theirs(error.param or "") or None
        ) from None
    return merged


def with_room(live: Live, sampling: dict[str, Any], prompt_tokens: int) -> dict[str, Any]:
    """The same with a length: for a chat that asked for none, all that the context leaves, as far
    as KV memory holds it."""
    if "max_new_tokens" in sampling:
        return sampling
    context = live.executor.context_length
    most = min(context, live.executor.engine.info.get("num_slots", context))
    return {**sampling, "max_new_tokens": max(1, most - prompt_tokens)}


def _theirs(text: str) -> str:
    """Parameters under the names that these requests have for them."""
    return text.replace("_new_tokens", "_tokens")


async def opened(
    request: Request, events: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    """The same events, the first of which is there: what fails before it is an error with a status
    of its own."""
    try:
        first = await while_connected(request, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return _chained(first, events)


async def _chained(
    first: bytes, events: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    try:
        yield first
        async for data in events:
            yield data
    finally:
        await events.aclose()
