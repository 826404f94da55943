"""The one place that looks at a constraint before anything is queued."""

from __future__ import annotations

import asyncio
from functools import lru_cache

from ..protocol.sampling import Constraint, SamplingParams

_SHORT = 32 << 10


async def check_constraint(params: SamplingParams) -> None:
    """Raises `GrammarError` for a constraint that is wrong by itself, whatever compiles it. Long
    ones are looked at in a thread, so that others go on meanwhile."""
    constraint = params.constraint
    if constraint is None:
        return
    if len(constraint.spec) > _SHORT:
        await asyncio.to_thread(check_one, constraint)
    else:
        check_one(constraint)


def check_one(constraint: Constraint) -> None:
    """The same for the constraint alone. That one is right is remembered, as services ask with the
    same few over and over."""
    if len(constraint.spec) <= _SHORT:
        _remembered(constraint)
    else:
        _check(constraint)


@lru_cache(maxsize=256)
def _remembered(constraint: Constraint) -> None:
    _check(constraint)


def _check(constraint: Constraint) -> None:
    from ..grammar.checks import check_spec
    from ..grammar.spec import Spec

    check_spec(Spec.of(constraint.kind, constraint.spec, constraint.whitespace))
