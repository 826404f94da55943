"""What llguidance says went wrong, in words for people."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..protocol.errors import GrammarError

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MESSAGE = 240
_MORE = re.compile("<state>|<grammar>|<backtrace>")


def check(inner: LLMatcher) -> None:
    """Raise `GrammarError` where the library is in its error state, which it never leaves."""
    if inner.is_error():
        raise GrammarError(*explain(inner.get_error()))


def explain(error: str) -> tuple[str]:
    """The library's error in one bounded line, with nothing of the spec that it may quote."""
    line = " ".join(_MORE.split(error, maxsplit=1)[0].split())
    if line.startswith("panic:") or "limits." in line:  # what only its own authors can act on
        line = "it is too complex, or not understood"
    if not line or line.startswith("NoExtensionBias"):
        line = "no output can match it, or none that this vocabulary can write"
    return (line if len(line) <= _MESSAGE else line[: _MESSAGE - 1] + "…",)
