"""Constrained requests on their way: from the grammar they wait for to the token that ends them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..protocol.errors import GrammarError
from ..scheduler.batch import IntArray
from ..scheduler.request import Request
from ..scheduler.scheduler import Scheduler
from .endings import Ending, Endings, Outcome
from .guides import Guides, may_jump
from .healing import leave_prefix
from .outputs import Outputs

RECENT = 16
"""Output tokens that a grammar is shown before those it forces."""


class Guided:
    """Moves requests along their grammars. What comes of it is for the caller to conclude."""

    def __init__(
        self, guides: Guides, scheduler: Scheduler, endings: Endings, outputs: Outputs
    ) -> None:
        self.guides = guides
        self.forced_tokens = 0
        self._scheduler = scheduler
        self._endings = endings
        self._outputs = outputs

    def start(self, request: Request) -> None:
        """Have a grammar compiled; until then the request stands aside. Raises what `Scheduler.add`
        does, and what the compiler refuses."""
        self._scheduler.add(request, aside=True)
        try:
            self.guides.start(request)
        except Exception:
            self._scheduler.remove(request)
            raise

    def bring_in(self) -> Iterator[tuple[Request, Outcome]]:
        """Queue the requests whose grammar is there."""
        for request, error in self.guides.ready():
            if error is not None:
                yield request, error
                continue
            self._scheduler.bring_in(request)
            yield request, self._begin(request)

    def go_on(self, at: IntArray, tokens: IntArray) -> Iterator[tuple[Request, Outcome]]:
        """`follow` for many rows [S] that sampled tokens [S]; those for which there was anything to
        do, with what came of it."""
        requests = self._scheduler.rows.requests
        pairs = [
            (request, token)
            for row, token in zip(at.tolist(), tokens.tolist())
            if (request := requests[row]) is not None
        ]
        for request, token in self.guides.go_on(pairs):
            yield request, self.follow(request, token)

    def follow(self, request: Request, token: int) -> Outcome:
        """Go on by the token that a running request sampled last, and by those that must follow.
        The token is no stop id, and ends no stop string."""
        rows, row = self._scheduler.rows, request.row
        known, made = int(rows.known[row]), int(rows.known[row] - rows.prompt_len[row])
        guide = self.guides[request]
        try:
            guide.accept(token, self._endings.token_bytes[token])
            if guide.done:
                return Ending("stop", token if guide.ended else None)
            if made >= request.sampling.max_new_tokens:
                return Ending("length")
            if not may_jump(request.sampling):
                return None
            recent = rows.tokens[row, max(known - RECENT, known - made) : known].tolist()
            forced = guide.forced(recent)[: max(self._room(request) - made, 0)]
            if not forced or not self._scheduler.append_forced(row, np.array(forced, np.int32)):
                return None
            count, ending = self._walk(request, forced, made)
        except GrammarError as error:
            return error
        rows.known[row] -= len(forced) - count
        return ending

    def heal(self, request: Request, token: int) -> Outcome:
        """The same for a request that is healing, where the token may be or hold a stop."""
        rows, row = self._scheduler.rows, request.row
        made = int(rows.known[row] - rows.prompt_len[row])
        outcome: Outcome = self._ending(request, token, made)
        if outcome is None or outcome.reason == "length":  # an output that is whole goes first
            outcome = self.follow(request, token)
        if not request.heal_left:
            rows.healing[row] = False
            if request.sampling.constraint is None:  # from here on it is as any other
                rows.masked[row] = False
                self.guides.forget(request)
        return outcome

    def _ending(self, request: Request, token: int, made: int) -> Ending | None:
        """Whether the ``made``-th token of the output ends it."""
        if not request.heal_left:
            return self._endings.of(request, token, made)
        data = leave_prefix(
            request, self._scheduler.rows, self._endings.token_bytes[token], self._context(request)
        )
        if data:
            return self._endings.of(request, token, made, data)
        return Ending("length") if made >= request.sampling.max_new_tokens else None

    def _room(self, request: Request) -> int:
        """Tokens that the output may have, those of nothing but its prefix included."""
        wanted = request.sampling.max_new_tokens + request.heal_left
        return min(wanted, self._context(request) - request.prompt_len)

    def _context(self, request: Request) -> int:
        limits = self._scheduler.limits
        own = limits.classes[request.cls].context_length
        return min(own or limits.context_length, limits.context_length)

    def _begin(self, request: Request) -> Outcome:
        """What must come first is output before anything is computed."""
        if not may_jump(request.sampling):
            return None
        try:
            forced = self.guides[request].forced([])[: self._room(request)]
            if not forced:
                return None
            count, ending = self._walk(request, forced, 0)
        except GrammarError as error:
            return error
        output = np.array(forced[:count], np.int32)
        request.tokens = np.concatenate((request.tokens, output))
        return ending

    def _walk(self, request: Request, forced: list[int], made: int) -> tuple[int, Ending | None]:
        """Hand out forced tokens up to one that ends the output; how many, and that end."""
        guide = self.guides[request]
        ending, count = None, 0
        for token in forced:
            count += 1
            guide.accept(token, self._endings.token_bytes[token])
            ending = self._ending(request, token, made + count)
            if guide.done and (ending is None or ending.reason == "length"):
                ending = Ending("stop")
            if ending is not None:
                break
        self.forced_tokens += count
        request.forced_tokens += count
        self._outputs.forced(request, forced[:count])
        return count, ending
