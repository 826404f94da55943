from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ramet.runtime.program.choices import choose
from ramet.runtime.protocol import BadInputError

A = [-0.1]
B = [-0.1, -0.3]
C = [-0.1, -0.25, -0.1, -0.01, -0.01, -0.01, -0.01, -0.01]


def test_token_length_normalized_takes_the_best_mean():
    decision = choose("token_length_normalized", [A, B, C])
    assert decision.index == 2
    assert decision.normalized == pytest.approx([-0.1, -0.2, -0.0625])
    assert decision.greedy_matrix is None


def test_greedy_pads_short_rows_with_their_means():
    first = [-0.4, *C[1:]]
    decision = choose("greedy_token_selection", [A, B, first])
    assert decision.index == 0
    assert decision.greedy_matrix is not None
    assert decision.greedy_matrix[0] == pytest.approx([-0.1] * 8)
    assert decision.greedy_matrix[1] == pytest.approx([-0.1, -0.3] + [-0.2] * 6)


def test_greedy_goes_on_while_columns_tie():
    assert choose("greedy_token_selection", [[-1.0, -2.0], [-1.0, -1.5], [-3.0, 0.0]]).index == 1


def test_unconditional_prefers_what_the_prompt_makes_likelier():
    alone = [[None], [None, -1.4], [None, *C[1:]]]
    decision = choose("unconditional_likelihood_normalized", [A, B, C], alone)
    assert decision.index == 1
    assert decision.normalized_unconditional == pytest.approx([-0.1, 0.5, -0.0125])


def test_unconditional_needs_the_same_tokens():
    method = "unconditional_likelihood_normalized"
    with pytest.raises(ValueError, match="missing"):
        choose(method, [A])
    with pytest.raises(ValueError, match="choice 1"):
        choose(method, [A, B], [[None], [None]])


def test_ties_go_to_the_first():
    assert choose("token_length_normalized", [[-1.0], [-0.5, -1.5], [-1.0]]).index == 0
    assert choose("greedy_token_selection", [[-1.0], [-1.0]]).index == 0


def test_a_choice_without_tokens_cannot_win():
    decision = choose("token_length_normalized", [[], [-9.0]])
    assert decision.index == 1
    assert math.isnan(decision.normalized[0])
    assert choose("greedy_token_selection", [[], [-9.0], [-8.0]]).index == 2


def test_counts_divide_the_sums():
    decision = choose("token_length_normalized", [[-1.0, -1.0], [-1.5]], counts=[1, 1])
    assert decision.normalized == [-2.0, -1.5]
    assert decision.index == 1


def test_bad_input_is_named():
    with pytest.raises(BadInputError, match="at least one choice"):
        choose("token_length_normalized", [])
    with pytest.raises(BadInputError, match="unknown choices method"):
        choose("best", [[-1.0]])  # pyright: ignore[reportArgumentType]


rows = st.lists(
    st.lists(st.floats(-50, 0, allow_nan=False), min_size=1, max_size=6), min_size=1, max_size=6
)


@given(rows)
def test_the_mean_winner_beats_all(logprobs: list[list[float]]):
    decision = choose("token_length_normalized", logprobs)
    best = decision.normalized[decision.index]
    assert all(best >= other for other in decision.normalized)
    assert decision.index == decision.normalized.index(best)


@given(rows)
def test_greedy_winner_has_the_best_first_token(logprobs: list[list[float]]):
    index = choose("greedy_token_selection", logprobs).index
    assert logprobs[index][0] == max(row[0] for row in logprobs)
