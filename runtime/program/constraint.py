"""The one place that decides whether a constrained generation can be honoured."""

from __future__ import annotations

from ..protocol.errors import GrammarError
from ..protocol.sampling import SamplingParams


def check_constraint(params: SamplingParams) -> None:
    """Raises `GrammarError` for a constraint that nothing here can enforce."""
    if params.constraint is not None:
        raise GrammarError(f"a {params.constraint.kind} constraint needs a grammar backend")
