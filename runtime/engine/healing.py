"""Outputs that begin with the end of their prompt, which the model cuts into tokens anew.

Until those bytes are out a request is healing: what comes may be masked by them, ends nothing, and
does not count. A token that holds them and more is the first that counts.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from ..grammar.prefix_matcher import PrefixGrammar
from ..scheduler.request import Request
from ..scheduler.rows import Rows


class Prefixes:
    """The vocabulary in order, made beside the steps when it is first asked for: sorting a large
    one takes as long as many of them. What waits for it looks like a grammar that is compiled."""

    def __init__(self, make: Callable[[], PrefixGrammar]) -> None:
        self._make = make
        self._made: Future[PrefixGrammar] | None = None

    def start(self) -> Prefixes:
        if self._made is None:
            pool = ThreadPoolExecutor(1, thread_name_prefix="ramet-prefixes")
            self._made = pool.submit(self._make)
            pool.shutdown(wait=False)
        return self

    def done(self) -> bool:
        return self._made is not None and self._made.done()

    def result(self) -> PrefixGrammar:
        """Waits where it is not there yet."""
        made = self.start()._made
        assert made is not None
        return made.result()

    def cancel(self) -> None:
        """Others may want it."""


def leave_prefix(request: Request, rows: Rows, data: bytes, context_length: int) -> bytes:
    """Go on by a token of a request that is healing; returns what of its bytes is past the prefix.

    One that has none may be followed by as many others as before, as far as the context goes.
    """
    more = data[request.heal_left :]
    request.heal_left = max(request.heal_left - len(data), 0)
    if not more:
        sampling = request.sampling
        most = min(sampling.max_new_tokens + 1, context_length - request.prompt_len)
        request.sampling = msgspec.structs.replace(sampling, max_new_tokens=most)
        if request.row >= 0:
            rows.max_new[request.row] = most
    return more
