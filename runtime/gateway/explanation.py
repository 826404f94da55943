"""Why a prompt was (or would be) found cached so far and no further, in words and numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from ..protocol.errors import BackendError
from ..protocol.messages import Divergence, Explained
from ..protocol.meta import Explanation
from .request import IntArray
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from .executor import EngineExecutor

T = TypeVar("T")

AROUND_TOKENS = 32
"""How much text is shown on either side of the place where a prompt leaves the cache."""
_SHOWN_BYTES = 6
"""Of a namespace's name, in tools for operators."""


def explanation(tokenizer: Tokenizer, ids: IntArray, found: Divergence) -> Explanation:
    """A divergence of the prompt ``ids`` with the text on both sides of it."""

    def text(tokens: Any) -> str:
        return tokenizer.decode((int(token) for token in tokens), skip_special=False)

    at, there = found.index, found.neighbour
    return Explanation(
        index=at,
        reason=found.reason,
        before=text(ids[max(at - AROUND_TOKENS, 0) : at]),
        after=text(ids[at : at + AROUND_TOKENS]),
        token=int(ids[at]) if at < len(ids) else None,
        neighbour=text(there) if there else None,
        neighbour_token=there[0] if there else None,
        branches=found.branches,
        hits=found.hits,
    )


def compared(tokenizer: Tokenizer, ids: IntArray, other: IntArray) -> Explanation:
    """Where a prompt would leave another, were that one alone cached."""
    n = min(len(ids), len(other))
    differ = np.flatnonzero(ids[:n] != other[:n])
    at = int(differ[0]) if len(differ) else n
    reason = "whole" if at == len(ids) else "ends" if at == len(other) else "differs"
    ahead = tuple(other[at : at + AROUND_TOKENS].tolist())
    found = Divergence(index=at, reason=reason, neighbour=ahead, branches=int(bool(ahead)))
    return explanation(tokenizer, ids, found)


async def explain(
    executor: EngineExecutor, ids: IntArray, cache_salt: str | None, *, everywhere: bool = False
) -> dict[str, Any]:
    """One prompt against what the engine has cached now, in the caller's own namespace; with
    ``everywhere`` also what another one has of it, for operators only."""
    data = await executor.engine.ask(
        "explain",
        ids=ids.tobytes(),
        namespace=executor.namespace(cache_salt),
        everywhere=everywhere,
    )
    found = answered(data, Explained)
    shown: dict[str, Any] = {
        "prompt_tokens": len(ids),
        "explanation": msgspec.to_builtins(explanation(executor.tokenizer, ids, found.here)),
    }
    if found.other is not None:
        other = explanation(executor.tokenizer, ids, found.other)
        shown["elsewhere"] = {
            "namespace": short(found.namespace),
            "explanation": msgspec.to_builtins(other),
        }
    return shown


def between(executor: EngineExecutor, ids: IntArray, other: IntArray) -> dict[str, Any]:
    """Two prompts against each other; the cache is not asked."""
    return {
        "prompt_tokens": len(ids),
        "other_tokens": len(other),
        "explanation": msgspec.to_builtins(compared(executor.tokenizer, ids, other)),
    }


def answered(data: dict[str, Any], kind: type[T]) -> T:
    """What the engine said, as what it should be. Raises `BackendError`."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise BackendError(f"the engine's answer makes no sense: {error}") from None


def short(namespace: bytes) -> str:
    """A namespace's name as operators see it; empty for that of callers without key and salt."""
    return namespace[:_SHOWN_BYTES].hex()
