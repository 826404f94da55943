"""What ends an output: a stop id, a stop string, or its length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from ..protocol.errors import RametError
from ..protocol.kept import kept
from ..scheduler.request import Request
from .stops import StopMatcher


class Ending(NamedTuple):
    """``matched``: the stop string, or the id that ended it; ``text_bytes``: bytes of output before
    a stop string, -1 without one."""

    reason: Literal["stop", "length"]
    matched: bytes | int | None = None
    text_bytes: int = -1


Outcome = Ending | RametError | None
"""How a request ends, why it fails, or None: it goes on."""


class Endings:
    """Follows the outputs of requests that have stop strings."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self.token_bytes = token_bytes
        self._matchers: dict[int, StopMatcher] = {}

    def watch(self, request: Request) -> None:
        """A request begins."""
        if request.sampling.stops:
            self._matchers[request.serial] = StopMatcher(request.sampling.stops)

    def forget(self, request: Request) -> None:
        self._matchers.pop(request.serial, None)

    def stop_string(
        self, request: Request, token: int, made: int, data: bytes | None = None
    ) -> Ending | None:
        """Go on by a token, the ``made``-th of the output, of a request that has stop strings.
        ``data``: what of its bytes counts, if not all."""
        data = self.token_bytes[token] if data is None else data
        hit = self._matchers[request.serial].push(data)
        if hit is None or made <= request.sampling.min_new_tokens:
            return None
        return Ending("stop", hit[0], hit[1])

    def kept(self, request: Request, output: Sequence[int], ending: Ending) -> int | None:
        """How many tokens of a request that has ended stay in its stream. ``None``: a stop string
        began inside of a token, and what is before it is to be cut anew."""
        if request.sampling.heal:
            return None
        by_token = isinstance(ending.matched, int)
        count, carry = kept(output, by_token, ending.text_bytes, self.token_bytes)
        return None if carry else request.prompt_len + count

    def of(
        self, request: Request, token: int, made: int, data: bytes | None = None
    ) -> Ending | None:
        """Whether the ``made``-th token ends the output, in any of the ways there are. ``data``:
        what of its bytes counts, if not all."""
        sampling = request.sampling
        if token in sampling.stop_ids and made > sampling.min_new_tokens:
            return Ending("stop", token)
        if sampling.stops and (ending := self.stop_string(request, token, made, data)):
            return ending
        return Ending("length") if made >= sampling.max_new_tokens else None
