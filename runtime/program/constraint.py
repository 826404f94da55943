"""The one place that looks at a constraint before anything is queued."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict

from ..protocol.sampling import Constraint, SamplingParams

SHORT = 512
"""Characters up to which looking at a constraint delays nobody."""
_KEPT = 256
_LONGEST_KEPT = 32 << 10

_right: OrderedDict[Constraint, None] = OrderedDict()
"""Constraints that were right, of late: services ask with the same few over and over."""
_lock = threading.Lock()


async def check_constraint(params: SamplingParams) -> None:
    """Raises `GrammarError` for a constraint that is wrong by itself, whatever compiles it. What
    may take long is looked at in a thread, so that others go on meanwhile."""
    constraint = params.constraint
    if constraint is None:
        return
    if len(constraint.spec) > SHORT and not _is_known(constraint):
        await asyncio.to_thread(check_one, constraint)
    else:
        check_one(constraint)


def check_one(constraint: Constraint) -> None:
    """The same for the constraint alone, at once."""
    if _is_known(constraint):
        return
    from ..grammar.checks import check_spec
    from ..grammar.spec import Spec

    check_spec(Spec.of(constraint.kind, constraint.spec, constraint.whitespace))
    if len(constraint.spec) > _LONGEST_KEPT:
        return
    with _lock:
        _right[constraint] = None
        if len(_right) > _KEPT:
            _right.popitem(last=False)


def _is_known(constraint: Constraint) -> bool:
    with _lock:
        known = constraint in _right
        if known:
            _right.move_to_end(constraint)
        return known
