"""Generations sent together with the one before them, which the engine goes on to by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..program.executor import Following, OnDelta
from ..protocol.errors import RametError
from ..protocol.sampling import SamplingParams
from .cutting import Known
from .engine_sampling import DEFAULT_NEW_TOKENS
from .generation import Generation, Sample, pieces_for
from .history import Item, Segment
from .request import EngineRequest, Handle, IntArray

if TYPE_CHECKING:
    from .executor import EngineExecutor


_FEW_STOPS = 256


@dataclass(slots=True)
class _Sent:
    """``items`` come between the generation before and this one, as ``tokens``."""

    items: list[Segment]
    tokens: IntArray
    params: SamplingParams
    request: EngineRequest


class GoingOn:
    """Of one stream. What was sent is taken where the stream comes to it as it was announced; in
    every other case it is dropped, and the stream asks anew."""

    def __init__(self, executor: EngineExecutor, known: Known) -> None:
        self._executor = executor
        self.known = known
        self._announced: Sequence[Following] = ()
        self._sent: list[_Sent] = []

    def announce(self, following: Sequence[Following]) -> None:
        """What comes after the stream's next generation."""
        self._announced = following

    def send_with(self, generation: Generation, special: bool) -> None:
        """Have a generation take along what follows it. ``special``: whether special tokens are
        recognised in the texts between."""
        announced, self._announced = self._announced, ()
        if not announced or self._sent or not _may_lead(generation):
            return
        executor, last = self._executor, None
        size = len(generation.prompt) + generation.sampling.max_new_tokens
        for one in announced:
            items: list[Segment] = [(text, special) for text in one.texts if text]
            params = one.sampling
            tokens = self.known.anywhere(items)
            if tokens is None or not _may_follow(params):
                return
            size += len(tokens)
            try:
                sampling = executor.resolve(params, size)
            except RametError:
                return  # told when it begins
            wanted = params.max_new_tokens
            if sampling.max_new_tokens < (DEFAULT_NEW_TOKENS if wanted is None else wanted):
                return
            if sampling.logprob_start >= 0:
                return
            size += sampling.max_new_tokens
            own = np.asarray(tokens, np.int32)
            request = executor.engine.follower(
                own,
                sampling,
                keep=executor.engine.new_handle() if one.reads else None,
                namespace=generation.namespace,
                program=generation.program,
                remaining=one.remaining,
            )
            if last is None:
                generation.then = request
            else:
                last.then = request
            last = request
            self._sent.append(_Sent(items, own, params, request))

    def take(
        self, pending: Sequence[Item], ids: IntArray, params: SamplingParams
    ) -> tuple[EngineRequest, IntArray] | None:
        """The request for the generation that begins, and its prompt, if it was sent. ``ids`` are
        settled, ``pending`` comes behind them."""
        if not self._sent:
            return None
        sent = self._sent[0]
        if sent.request.broken or sent.params != params or [*pending] != sent.items:
            self.drop()
            return None
        del self._sent[0]
        self._announced = ()  # it is on its way, and takes no more along
        return sent.request, np.concatenate((ids, sent.tokens))

    async def run(
        self,
        request: EngineRequest,
        prompt: IntArray,
        params: SamplingParams,
        on_delta: OnDelta | None,
    ) -> tuple[Sample, Handle | None]:
        """What was taken, once it is done, and where the engine keeps it."""
        executor, keep = self._executor, request.keep
        generation = Generation(
            executor.engine,
            executor.tokenizer,
            params,
            prompt,
            request.sampling,
            program=request.program,
            sent=request,
        )
        try:
            return await generation.run(pieces_for(on_delta)), keep
        except BaseException:
            self.drop()
            if keep is not None:
                keep.release()
            raise

    def drop(self) -> None:
        """Nobody will take what was sent."""
        self._announced = ()
        while self._sent:
            request = self._sent.pop().request
            self._executor.engine.abort(request)
            if request.keep is not None:
                request.keep.release()


def _may_lead(generation: Generation) -> bool:
    sampling, params = generation.sampling, generation.params
    return (
        params.n == 1
        and sampling.max_new_tokens > 0
        and sampling.constraint is None
        and not sampling.heal
    )


def _may_follow(params: SamplingParams) -> bool:
    """What the engine could refuse is sent by itself: it would be told of the one before."""
    plain = params.constraint is None and not params.heal and not params.explain
    few = len(params.stop_token_ids) <= _FEW_STOPS
    return plain and few and params.n == 1 and params.max_new_tokens != 0
