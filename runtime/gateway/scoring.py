"""`select`: where choices' tokens begin, what the engine says of them, and which one wins.

What all choices begin with (at least the prompt's settled tokens) is the prefix; what follows is a
trie, which the engine scores at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from ..program.choices import Decision, choose
from ..program.instructions import ChoicesMethod
from ..protocol.errors import BadInputError, ContextLengthError
from ..protocol.meta import ChoiceScore, LogprobEntry, MetaInfo
from .cutting import ends_of, in_turns
from .explanation import explanation
from .generation import all_of
from .logprobs import token_text
from .request import FloatArray, Handle, IntArray, joined
from .token_trie import TokenTrie, trie_of
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from .context import EngineContext

_NONE = np.empty(0, np.int32)


@dataclass(slots=True)
class Scored:
    """The winner, the stream's tokens with it appended, and the scores of all."""

    index: int
    ids: IntArray
    shared: int
    """How many leading tokens all choices have in common."""
    meta: MetaInfo


@dataclass(slots=True)
class Cut:
    """Choices as tokens: each is ``prefix`` and then its row, which is what is scored; ``counts``
    of a row's tokens hold a byte of the choice."""

    prefix: IntArray
    rows: list[list[int]]
    counts: list[int]


async def score_choices(
    context: EngineContext,
    tokenizer: Tokenizer,
    choices: Sequence[str],
    method: ChoicesMethod,
    boundary: Literal["exact", "plain"],
    keep: Handle | None,
    room: int,
) -> Scored:
    """Score every choice as a continuation of the context, in a context of ``room`` tokens. Equal
    ones are scored once. What they have in common is kept in ``keep``, if given.

    Raises `BadInputError` for no choices or an empty one, `ContextLengthError` for a long one.
    """
    if not choices:
        raise BadInputError("select needs at least one choice", param="choices")
    for number, choice in enumerate(choices):
        if not choice:
            raise BadInputError(f"choice {number} of select is empty", param="choices")
    cut = await (_exact if boundary == "exact" else _plain)(context, tokenizer, choices, room)
    trie = trie_of(cut.rows)
    scorings = [await context.scoring(cut.prefix, keep if len(cut.prefix) else None)]
    if method == "unconditional_likelihood_normalized":
        scorings.append(await context.bare().scoring(_NONE, None))
    scores = await all_of([scoring.run(trie) for scoring in scorings])
    given, *alone = [_by_choice(trie, found.values) for found in scores]
    decision = choose(
        method,
        [[value or 0.0 for value in row] for row in given],
        alone[0] if alone else None,
        cut.counts,
    )
    found = scores[0].divergence
    meta = MetaInfo(
        prompt_tokens=len(cut.prefix),
        cached_tokens=scores[0].cached,
        choices=[
            _choice_score(tokenizer, cut, decision, i, choice, scores_of)
            for i, (choice, *scores_of) in enumerate(zip(choices, given, *alone, strict=True))
        ],
        greedy_logprob_matrix=decision.greedy_matrix,
        explain=None if found is None else explanation(tokenizer, cut.prefix, found),
    )
    winner = np.asarray(cut.rows[decision.index], np.int32)
    ids = np.concatenate([cut.prefix, winner])
    return Scored(decision.index, ids, len(cut.prefix), meta)


async def _exact(
    context: EngineContext, tokenizer: Tokenizer, choices: Sequence[str], room: int
) -> Cut:
    """Prompt and choice tokenized together; scored from where the tokens of all part, which may
    be before the choice begins when it changes how the prompt's end is cut."""
    whole, cutter, many = await context.tokens(), context.cutter(), len(choices) > 1
    before = len(context.settled())
    ends = await ends_of(cutter, whole, many)
    found: list[tuple[int, list[int]]] = []
    async for kept, row in in_turns(
        ends.cut,
        [context.segment(choice) for choice in choices],
        lambda end: ends.size + len(end[0]),
    ):
        _check_room(len(found), before + kept + len(row), room)
        found.append((kept, row))
    shared = min(kept for kept, _ in found)
    rows = [whole[shared:kept] + row for kept, row in found]
    counts = [
        _holding(tokenizer, row, len(choice.encode("utf-8", "replace")))
        for choice, row in zip(choices, rows, strict=True)
    ]
    return Cut(joined(context.settled(), whole[:shared]), rows, counts)


async def _plain(
    context: EngineContext, tokenizer: Tokenizer, choices: Sequence[str], room: int
) -> Cut:
    """Prompt and choice tokenized apart."""
    prefix = joined(context.settled(), await context.tokens())
    rows: list[list[int]] = []
    async for row in in_turns(
        lambda choice: tokenizer.encode_segments([context.segment(choice)]), choices, len
    ):
        _check_room(len(rows), len(prefix) + len(row), room)
        rows.append(row)
    return Cut(prefix, rows, [len(row) for row in rows])


def _check_room(number: int, size: int, room: int) -> None:
    """At once: a prompt that is too long is not cut for every choice."""
    if size > room:
        raise ContextLengthError(
            f"choice {number} ends after {size} tokens; the context holds {room}", param="choices"
        )


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


def _by_choice(trie: TokenTrie, values: FloatArray) -> list[list[float | None]]:
    """Log-probs of each choice's tokens; ``None`` for a first one that has nothing before it."""
    known = [None if math.isnan(value) else value for value in values.tolist()]
    return [[known[node] for node in path] for path in trie.paths]


def _choice_score(
    tokenizer: Tokenizer,
    cut: Cut,
    decision: Decision,
    number: int,
    choice: str,
    scores: Sequence[Sequence[float | None]],
) -> ChoiceScore:
    """``scores``: after the prompt, and alone where that was asked for."""
    given, *alone = [_entries(tokenizer, cut.rows[number], values) for values in scores]
    normalized_alone = decision.normalized_unconditional
    return ChoiceScore(
        text=choice,
        input_token_logprobs=given,
        normalized_prompt_logprobs=decision.normalized[number],
        unconditional_token_logprobs=alone[0] if alone else None,
        normalized_unconditional_prompt_logprobs=None
        if normalized_alone is None
        else normalized_alone[number],
    )


def _entries(
    tokenizer: Tokenizer, row: Sequence[int], values: Sequence[float | None]
) -> list[LogprobEntry]:
    return [(value, token, token_text(tokenizer, token)) for value, token in zip(values, row)]
