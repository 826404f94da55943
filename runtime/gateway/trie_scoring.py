"""All continuations of a prompt scored in one request, or in as few as they fit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ..protocol.errors import BackendError
from ..protocol.messages import Divergence, EngineSampling, Finish
from .engine_client import EngineClient
from .generation import all_of
from .request import FloatArray, Handle, IntArray
from .token_trie import Piece, TokenTrie

MOST_COMPUTED = 2048
"""Nodes computed by one request: their KV must be there at the same time, and each looks at all."""
MOST_AT_ONCE = 4
"""Requests of one scoring: all that it needs may be more than a queue takes."""
SCORE_TRIE = EngineSampling(max_new_tokens=0)


@dataclass(slots=True)
class TrieScores:
    """``values`` [N]: the log-prob of each node after its path; NaN where nothing comes before.
    ``cached``: how many tokens of the prompt were; ``divergence``: where it left what was, if that
    was asked for."""

    values: FloatArray
    cached: int = 0
    divergence: Divergence | None = None


@dataclass(slots=True)
class TrieScoring:
    """What scoring continuations of ``prompt`` takes. The first request keeps the prompt in
    ``keep``, carries the marks, and is the one to ``explain``."""

    engine: EngineClient
    prompt: IntArray
    room: int
    """Tokens that the prompt and what is computed of a trie may have together."""
    base: Handle | None = None
    base_len: int = 0
    keep: Handle | None = None
    namespace: bytes = b""
    program: int = 0
    remaining: int = 0
    marks: tuple[tuple[int, int], ...] = ()
    explain: bool = False

    async def run(self, trie: TokenTrie) -> TrieScores:
        """Raises what the engine reports. Cancelled, it aborts its requests."""
        scores = TrieScores(np.full(len(trie.tokens), np.nan, np.float32))
        pieces = list(self._pieces(trie))
        others = replace(self, keep=None, marks=(), explain=False)
        turns = asyncio.Semaphore(MOST_AT_ONCE)

        async def score(number: int, piece: Piece) -> tuple[FloatArray, Finish]:
            async with turns:
                return await (others if number else self)._score(piece, not number)

        jobs = [score(number, piece) for number, piece in enumerate(pieces)]
        for number, (piece, (values, finish)) in enumerate(
            zip(pieces, await all_of(jobs), strict=True)
        ):
            # What two pieces share has one value: the last bits would decide between equals.
            known = scores.values[piece.nodes]
            scores.values[piece.nodes] = np.where(np.isnan(known), values, known)
            if not number:
                scores.cached, scores.divergence = finish.cached_tokens, finish.divergence
        return scores

    def _pieces(self, trie: TokenTrie) -> Iterator[Piece]:
        most = min(MOST_COMPUTED, max(self.room // 4, 1), self.room - len(self.prompt))
        for piece in trie.pieces(most):
            # With nothing before them, the first tokens have no log-prob.
            if len(self.prompt) or not piece.first.all():
                yield piece

    async def _score(self, piece: Piece, counts_prompt: bool) -> tuple[FloatArray, Finish]:
        began = time.monotonic()
        request = self.engine.submit(
            self.prompt,
            SCORE_TRIE,
            base=self.base,
            base_len=self.base_len,
            keep=self.keep,
            namespace=self.namespace,
            program=self.program,
            remaining=self.remaining,
            marks=self.marks,
            explain=self.explain,
            trie=piece.message,
        )
        try:
            while not await request.news():
                pass
        finally:
            self.engine.abort(request)
            self.engine.observer.ended(request, began, counts_prompt)
        assert request.finish is not None
        values = np.full(len(piece.nodes), np.nan, np.float32)
        if request.prompt_logprobs is not None:
            values[piece.order] = request.prompt_logprobs
        told = ~np.isnan(values)
        if not len(self.prompt):
            told |= piece.first
        if not told.all():
            raise BackendError("the engine did not tell all log-probs of the choices")
        return values, request.finish
