"""The arithmetic of `select`: from log-probs of the choices' tokens to the winner."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from ..protocol.errors import BadInputError
from .instructions import ChoicesMethod


class Decision(msgspec.Struct, frozen=True):
    """The winner's index, and the numbers it was chosen by (one entry a choice).

    ``normalized``: mean log-probs (NaN for a choice without a scored token, which cannot win).
    ``greedy_matrix``, of the greedy method: the log-probs, each row padded with its own mean.
    ``normalized_unconditional``, of the unconditional method: the mean of (log-prob after the
    prompt - log-prob without it).
    """

    index: int
    normalized: list[float]
    greedy_matrix: list[list[float]] | None = None
    normalized_unconditional: list[float] | None = None


def choose(
    method: ChoicesMethod,
    logprobs: Sequence[Sequence[float]],
    unconditional: Sequence[Sequence[float | None]] | None = None,
    counts: Sequence[int] | None = None,
) -> Decision:
    """Decide between choices by the natural log-probs of their tokens. Ties go to the first.

    ``counts`` gives what each choice's sum is divided by, where that is not its number of tokens.
    ``unconditional`` holds the same tokens' log-probs without the prompt (``None`` counts as 0).
    Raises `BadInputError` for no choices, an unknown method, or unconditional log-probs that are
    missing or of other lengths.
    """
    if not logprobs:
        raise BadInputError("select needs at least one choice", param="choices")
    divisors = [len(row) for row in logprobs] if counts is None else list(counts)
    if len(divisors) != len(logprobs):
        raise BadInputError(f"{len(divisors)} counts for {len(logprobs)} choices", param="counts")
    means = [_mean(row, count) for row, count in zip(logprobs, divisors, strict=True)]
    if method == "token_length_normalized":
        return Decision(_argmax(means), means)
    if method == "greedy_token_selection":
        return _greedy(logprobs, means)
    if method == "unconditional_likelihood_normalized":
        return _unconditional(logprobs, means, unconditional, divisors)
    raise BadInputError(f"unknown choices method {method!r}", param="choices_method")


def _mean(row: Sequence[float], count: int) -> float:
    return math.fsum(row) / count if row and count > 0 else math.nan


def _argmax(values: Sequence[float]) -> int:
    best = 0
    for index, value in enumerate(values):
        if value > values[best] or (math.isnan(values[best]) and not math.isnan(value)):
            best = index
    return best


def _greedy(logprobs: Sequence[Sequence[float]], means: list[float]) -> Decision:
    width = max(len(row) for row in logprobs)
    matrix = [[*row, *[mean] * (width - len(row))] for row, mean in zip(logprobs, means)]
    alive = [index for index, mean in enumerate(means) if not math.isnan(mean)] or [0]
    for column in range(width):
        if len(alive) == 1:
            break
        best = max(matrix[index][column] for index in alive)
        alive = [index for index in alive if matrix[index][column] == best]
    return Decision(alive[0], means, greedy_matrix=matrix)


def _unconditional(
    logprobs: Sequence[Sequence[float]],
    means: list[float],
    unconditional: Sequence[Sequence[float | None]] | None,
    divisors: Sequence[int],
) -> Decision:
    if unconditional is None or len(unconditional) != len(logprobs):
        raise BadInputError("unconditional log-probs are missing", param="unconditional")
    scores: list[float] = []
    for index, (given, alone) in enumerate(zip(logprobs, unconditional, strict=True)):
        if len(given) != len(alone):
            raise BadInputError(
                f"choice {index}: {len(given)} log-probs after the prompt, {len(alone)} without it",
                param="unconditional",
            )
        scores.append(_mean([a - (b or 0.0) for a, b in zip(given, alone)], divisors[index]))
    return Decision(_argmax(scores), means, normalized_unconditional=scores)
