"""The one place that looks at a constraint before anything is queued."""

from __future__ import annotations

from ..protocol.sampling import SamplingParams


def check_constraint(params: SamplingParams) -> None:
    """Raises `GrammarError` for a constraint that is wrong by itself, whatever compiles it."""
    constraint = params.constraint
    if constraint is None:
        return
    from ..grammar.checks import check_spec
    from ..grammar.spec import Spec

    check_spec(Spec.of(constraint.kind, constraint.spec, constraint.whitespace))
