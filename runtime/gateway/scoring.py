"""`select`: where a choice's tokens begin, what the engine says of them, and which one wins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from ..program.choices import choose
from ..program.instructions import ChoicesMethod
from ..protocol.errors import BadInputError
from ..protocol.meta import ChoiceScore, LogprobEntry, MetaInfo
from ..protocol.sampling import SamplingParams
from .generation import all_of
from .logprobs import token_text
from .request import Handle, IntArray
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from .context import EngineContext


@dataclass(slots=True)
class Scored:
    """The winner, the stream's tokens with it appended, and the scores of all."""

    index: int
    ids: IntArray
    shared: int
    """How many leading tokens all choices have in common."""
    meta: MetaInfo


@dataclass(slots=True)
class Candidate:
    """One choice cut into tokens: ``ids`` is the whole sequence, scored from ``start`` on, and
    ``count`` of the scored tokens hold a byte of the choice."""

    ids: IntArray
    start: int
    count: int

    @property
    def scored(self) -> list[int]:
        return self.ids[self.start :].tolist()


async def score_choices(
    context: EngineContext,
    tokenizer: Tokenizer,
    choices: Sequence[str],
    method: ChoicesMethod,
    boundary: Literal["exact", "plain"],
    keep: Handle,
) -> Scored:
    """Score every choice as a continuation of the context. Equal ones are scored once. What they
    have in common is kept in ``keep``.

    Raises `BadInputError` for no choices or an empty one, `ContextLengthError` for a long one.
    """
    if not choices:
        raise BadInputError("select needs at least one choice", param="choices")
    for number, choice in enumerate(choices):
        if not choice:
            raise BadInputError(f"choice {number} of select is empty", param="choices")
    if boundary == "exact":
        candidates = await _exact(context, tokenizer, choices)
    else:
        candidates = await _plain(context, choices)
    shared = candidates[0].start
    await context.share(candidates[0].ids[:shared], keep)
    scores, cached = await _score(context, candidates)
    alone = None
    if method == "unconditional_likelihood_normalized":
        alone = await _unconditional(context, candidates)
    decision = choose(
        method,
        [[value or 0.0 for value in row] for row in scores],
        alone,
        [candidate.count for candidate in candidates],
    )
    normalized_alone = decision.normalized_unconditional
    rows = [
        ChoiceScore(
            text=choice,
            input_token_logprobs=_entries(tokenizer, candidate, scores[i]),
            normalized_prompt_logprobs=decision.normalized[i],
            unconditional_token_logprobs=_entries(tokenizer, candidate, alone[i])
            if alone is not None
            else None,
            normalized_unconditional_prompt_logprobs=normalized_alone[i]
            if normalized_alone is not None
            else None,
        )
        for i, (choice, candidate) in enumerate(zip(choices, candidates, strict=True))
    ]
    winner = candidates[decision.index]
    meta = MetaInfo(
        prompt_tokens=winner.start,
        cached_tokens=cached,
        choices=rows,
        greedy_logprob_matrix=decision.greedy_matrix,
    )
    return Scored(decision.index, winner.ids, shared, meta)


async def _exact(
    context: EngineContext, tokenizer: Tokenizer, choices: Sequence[str]
) -> list[Candidate]:
    """Prompt and choice tokenized together; scored from where the tokens of all part, which may
    be before the choice begins when it changes how the prompt's end is cut."""
    settled = context.settled()
    bare, *tokens = await context.tokens_with(["", *choices])
    shared = _common_prefix([bare, *tokens])
    return [
        Candidate(
            np.concatenate([settled, np.asarray(ids, np.int32)]),
            len(settled) + shared,
            _holding(tokenizer, ids[shared:], len(choice.encode("utf-8", "replace"))),
        )
        for choice, ids in zip(choices, tokens, strict=True)
    ]


async def _plain(context: EngineContext, choices: Sequence[str]) -> list[Candidate]:
    """Prompt and choice tokenized apart."""
    (bare,) = await context.tokens_with([""])
    prompt = np.concatenate([context.settled(), np.asarray(bare, np.int32)])
    candidates: list[Candidate] = []
    for choice in choices:
        ids = context.encode_alone(choice)
        whole = np.concatenate([prompt, np.asarray(ids, np.int32)])
        candidates.append(Candidate(whole, len(prompt), len(ids)))
    return candidates


def _common_prefix(rows: Sequence[Sequence[int]]) -> int:
    shortest, others = min(rows, key=len), rows
    for position, token in enumerate(shortest):
        if any(row[position] != token for row in others):
            return position
    return len(shortest)


def _holding(tokenizer: Tokenizer, ids: Sequence[int], size: int) -> int:
    """How many tokens at the end hold the last ``size`` bytes of the text."""
    count = 0
    while size > 0 and count < len(ids):
        count += 1
        size -= len(token_text_bytes(tokenizer, ids[-count]))
    return count


def token_text_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """A token's bytes in the text it came from: for a special token, those of its name."""
    data = tokenizer.token_bytes(token)
    return data or token_text(tokenizer, token).encode()


async def _score(
    context: EngineContext, candidates: Sequence[Candidate]
) -> tuple[list[list[float | None]], int]:
    """Log-probs of each candidate's scored tokens, and the most that any found cached."""
    jobs: dict[bytes, int] = {}
    requests: list[Candidate] = []
    for candidate in candidates:
        key = candidate.ids.tobytes()
        if key not in jobs:
            jobs[key] = len(requests)
            requests.append(candidate)
    results = await all_of([_score_one(context, candidate) for candidate in requests])
    rows = [results[jobs[candidate.ids.tobytes()]][0] for candidate in candidates]
    _same_for_same(candidates, rows)
    return rows, max(cached for _, cached in results)


def _same_for_same(candidates: Sequence[Candidate], rows: list[list[float | None]]) -> None:
    """One log-prob for one token after one prefix. Two requests may differ in the last bits, which
    would decide between choices that begin alike."""
    known: dict[bytes, float | None] = {}
    for candidate, row in zip(candidates, rows, strict=True):
        for offset, value in enumerate(row):
            prefix = candidate.ids[: candidate.start + offset + 1].tobytes()
            row[offset] = known.setdefault(prefix, value)


async def _score_one(
    context: EngineContext, candidate: Candidate
) -> tuple[list[float | None], int]:
    params = SamplingParams(
        max_new_tokens=0,
        temperature=0.0,
        seed=0,
        return_logprob=True,
        logprob_start_len=candidate.start,
    )
    sample = await context.generation(candidate.ids, params).run()
    entries = sample.meta.input_token_logprobs or []
    return [entry[0] for entry in entries], sample.meta.cached_tokens


async def _unconditional(
    context: EngineContext, candidates: Sequence[Candidate]
) -> list[list[float | None]]:
    """Log-probs of the scored tokens by themselves; the first has none, which counts as 0."""
    alone = [Candidate(c.ids[c.start :], 0, c.count) for c in candidates]
    fresh = context.bare()
    rows, _ = await _score(fresh, alone)
    return rows


def _entries(
    tokenizer: Tokenizer, candidate: Candidate, values: Sequence[float | None]
) -> list[LogprobEntry]:
    return [
        (value, token, token_text(tokenizer, token))
        for value, token in zip(values, candidate.scored)
    ]
