"""What no automaton has in the patterns of a JSON schema: found by name, before they compile."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from re import _constants as op  # pyright: ignore[reportAttributeAccessIssue]
from re import _parser  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any

from ..protocol.errors import GrammarError

MAX_PATTERN = 20_000
"""Characters; longer ones are left to the backend."""

_FOREIGN = re.compile(r"\\(?:[pPuxX]\{[^{}]*\}|[pP][A-Za-z]|c[A-Za-z])")
_NAMED = re.compile(r"(?<!\\)\(\?<(?=[A-Za-z_])")
"""What Python writes otherwise, or not at all."""
_NAMES = {
    op.GROUPREF: "a backreference",
    op.GROUPREF_EXISTS: "a conditional group",
    op.ATOMIC_GROUP: "an atomic group",
    op.POSSESSIVE_REPEAT: "a possessive quantifier",
}


def check_pattern(pattern: str, where: str) -> None:
    """Raises `GrammarError` for look-around, backreferences and word boundaries. A pattern that
    Python does not read is of another dialect: the backend says what is wrong with it."""
    if len(pattern) > MAX_PATTERN:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = _parser.parse(_NAMED.sub("(?P<", _FOREIGN.sub("x", pattern)))
        found = next(_unsupported(parsed), None)
    except (re.error, OverflowError, RecursionError):
        return
    if found is not None:
        raise GrammarError(f"{found} is not supported in a pattern", where=where)


def _unsupported(items: Any) -> Iterator[str]:
    for code, value in items:
        if code in (op.ASSERT, op.ASSERT_NOT):
            yield "look-ahead" if value[0] > 0 else "look-behind"
        elif code in _NAMES:
            yield _NAMES[code]
        elif code is op.AT and value in (op.AT_BOUNDARY, op.AT_NON_BOUNDARY):
            yield r"the word boundary \b"
        elif code is op.BRANCH:
            for branch in value[1]:
                yield from _unsupported(branch)
        elif code is op.SUBPATTERN:
            yield from _unsupported(value[3])
        elif code in (op.MAX_REPEAT, op.MIN_REPEAT):
            yield from _unsupported(value[2])
