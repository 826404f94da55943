"""How `select` decides; the names that ``choices_method=`` takes."""

from __future__ import annotations

from typing import Final, Literal, get_args

ChoicesMethod = Literal[
    "token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"
]

token_length_normalized: Final = "token_length_normalized"
"""The highest mean log-prob a token. Favours long choices with predictable tails."""

greedy_token_selection: Final = "greedy_token_selection"
"""Token by token, keep the choices whose token is most likely. The first token can mislead."""

unconditional_likelihood_normalized: Final = "unconditional_likelihood_normalized"
"""How much more likely the prompt makes a choice than it is alone. Scores every choice twice."""

METHODS: Final = frozenset(get_args(ChoicesMethod))
