"""One sample from the engine: submit it, collect tokens, make text once, say how it went."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from ..program.executor import OnDelta
from ..protocol.kept import kept
from ..protocol.messages import EngineSampling, Finish
from ..protocol.meta import FinishReason, MetaInfo
from ..protocol.sampling import SamplingParams
from .detokenizer import Detokenizer
from .engine_client import EngineClient
from .engine_sampling import MAX_SEED
from .explanation import explanation
from .healing import healed_tokens
from .logprobs import output_entries, prompt_entries, special_text
from .request import EngineRequest, Handle, IntArray
from .stopper import Stopper
from .tokenizer import Tokenizer

OnPiece = Callable[[str, list[int], MetaInfo | None], None]
"""Called with new text, new output ids, and the log-probs of just those where asked for; the first
time also with those of the prompt."""

T = TypeVar("T")


@dataclass(slots=True)
class Sample:
    """A finished sample. The first ``kept`` tokens stay in the stream exactly as they are;
    ``carry`` is text that came with a dropped token, to be joined to what is written next. The
    first ``healed`` tokens hold nothing but what was taken back of the prompt."""

    text: str
    tokens: list[int]
    kept: int
    carry: str
    meta: MetaInfo
    healed: int = 0


@dataclass(slots=True)
class Generation:
    """What one sample needs to run. ``prompt`` is whole, also where it builds on ``base``."""

    engine: EngineClient
    tokenizer: Tokenizer
    params: SamplingParams
    prompt: IntArray
    sampling: EngineSampling
    base: Handle | None = None
    base_len: int = 0
    keep: Handle | None = None
    namespace: bytes = b""
    program: int = 0
    remaining: int = 0
    """Requests of the program that are to come, as far as it was sent."""
    marks: tuple[tuple[int, int], ...] = ()
    """(handle, length) of prefixes that the program will read again."""
    name: str | None = None
    """``id`` in the meta info; by default made of the program's and the request's number."""
    counts_prompt: bool = True
    """For metrics: of several samples, the first counts the prompt."""

    stopper: Stopper | None = None
    explain: bool = False
    then: EngineRequest | None = None
    """What goes on where this one ends, to be submitted with it."""
    sent: EngineRequest | None = None
    """The request, if it was submitted with the one before."""

    def sample(self, index: int) -> Generation:
        """The same for another sample: with a seed of its own. The first is this one."""
        if index == 0:
            return self
        seed = (self.sampling.seed + index) & MAX_SEED
        sampling = msgspec.structs.replace(self.sampling, seed=seed)
        return replace(self, sampling=sampling, counts_prompt=False)

    async def run(self, on_piece: OnPiece | None = None) -> Sample:
        """Raises what the engine reports. Cancelled, it aborts the request."""
        began = time.monotonic()
        request = self._request(on_piece is not None)
        if request.since:
            began = request.since
        if self.stopper is not None:
            self.stopper.watch(request)
        text = _Text(self, request, on_piece)
        try:
            while not await request.news():
                text.more()
        finally:
            self.engine.abort(request)
            self.engine.observer.ended(request, began, self.counts_prompt)
        finish = request.finish
        assert finish is not None
        whole = text.end(finish)
        table, prefix = self.tokenizer.bytes_table, self.sampling.heal
        by_token = isinstance(finish.matched, int)
        stay, carry = kept(request.tokens, by_token, finish.text_bytes, table, prefix)
        healed = healed_tokens(request.tokens, table, len(prefix))
        meta = self._meta(request, finish, began, healed)
        text = carry.decode("utf-8", "replace")
        return Sample(whole, request.tokens, stay, text, meta, healed)

    def _request(self, streaming: bool) -> EngineRequest:
        """Submitted now, or before."""
        if self.sent is not None:
            self.engine.claim(self.sent, self.prompt, streaming)
            return self.sent
        return self.engine.submit(
            self.prompt,
            self.sampling,
            base=self.base,
            base_len=self.base_len,
            keep=self.keep,
            namespace=self.namespace,
            program=self.program,
            remaining=self.remaining,
            marks=self.marks,
            streaming=streaming,
            explain=self.explain or self.params.explain,
            then=self.then,
        )

    def _meta(self, request: EngineRequest, finish: Finish, began: float, healed: int) -> MetaInfo:
        """``healed``: leading tokens of the output that are the prompt's."""
        first, found = request.first_token_at, finish.divergence
        output, output_tops = None, None
        if self.params.return_logprob or self.params.top_logprobs_num:
            output, output_tops = output_entries(request, self.tokenizer, healed)
        prompt, prompt_tops = prompt_entries(request, self.tokenizer, healed) or (None, None)
        return MetaInfo(
            id=self.name or f"{self.program}.{request.rid}",
            finish_reason=finish_reason(finish),
            prompt_tokens=len(self.prompt) + healed,
            completion_tokens=len(request.tokens) - healed,
            cached_tokens=finish.cached_tokens,
            e2e_latency=time.monotonic() - began,
            ttft=None if first is None else first - began,
            input_token_logprobs=prompt,
            output_token_logprobs=output,
            input_top_logprobs=prompt_tops,
            output_top_logprobs=output_tops,
            explain=None if found is None else explanation(self.tokenizer, self.prompt, found),
        )


class _Text:
    """The text of a request as it grows. A token that may be the stop is held back until what
    follows, or the end, says what it was."""

    def __init__(
        self, generation: Generation, request: EngineRequest, on_piece: OnPiece | None
    ) -> None:
        tokenizer, sampling = generation.tokenizer, generation.sampling
        self._tokenizer = tokenizer
        self._request = request
        self._on_piece = on_piece
        self._stop_ids = frozenset(sampling.stop_ids)
        self._logprobs = generation.params.return_logprob
        self._pushed = 0
        self._told = 0
        self._prefix = len(sampling.heal)
        self._healing = self._prefix > 0
        self._healed = 0
        self._prompt_told = False
        # Below min_new_tokens the engine lets stop strings pass. Only it counts, so all waits.
        self._hold = bool(sampling.stops) and sampling.min_new_tokens > 0
        skip = generation.params.skip_special_tokens
        self._shown = {} if skip else special_text(tokenizer)
        self._text = Detokenizer(
            tokenizer.bytes_table,
            tokenizer.special_ids,
            skip,
            sampling.stops,
            self._shown,
            self._prefix,
        )

    def more(self) -> None:
        """Push what has come since, but for a last token that may end it."""
        if self._hold:
            return
        tokens = self._request.tokens
        end = len(tokens)
        if end and tokens[-1] in self._stop_ids:
            end -= 1
        if end > self._pushed:
            piece = self._text.push(tokens[self._pushed : end])
            self._pushed = end
            self._tell(piece, end)

    def end(self, finish: Finish) -> str:
        """The whole text, without a stop token and what a stop string cut."""
        tokens = self._request.tokens
        end = len(tokens) - isinstance(finish.matched, int)
        if self._hold:
            whole = piece = self._as_cut(tokens[:end], finish.text_bytes)
        else:
            piece = self._text.push(tokens[self._pushed : end])
            piece += self._text.finish(finish.text_bytes)
            whole = self._text.text
        self._tell(piece, len(tokens))
        return whole

    def _as_cut(self, tokens: Sequence[int], text_bytes: int) -> str:
        """All text at once, up to where the engine says that the stop string begins."""
        table, skip = self._tokenizer.bytes_table, self._prefix
        left = text_bytes if text_bytes >= 0 else sum(len(table[token]) for token in tokens)
        data = bytearray()
        for token in tokens:
            piece = table[token][skip:]
            skip = max(skip - len(table[token]), 0)
            data += self._shown.get(token) or piece[:left]
            left -= len(piece)
            if left <= 0 and not skip and text_bytes >= 0:
                break
        return data.decode("utf-8", "replace")

    def _tell(self, piece: str, upto: int) -> None:
        if self._on_piece is None:
            return
        if self._healing:
            table, tokens = self._tokenizer.bytes_table, self._request.tokens[:upto]
            self._told = self._healed = healed_tokens(tokens, table, self._prefix)
            self._healing = self._healed == upto
        meta = None
        if self._logprobs and upto > self._told:
            entries, tops = output_entries(self._request, self._tokenizer, self._told, upto)
            meta = MetaInfo(output_token_logprobs=entries, output_top_logprobs=tops)
            if not self._prompt_told:
                self._prompt_told = True
                prompt = prompt_entries(self._request, self._tokenizer, self._healed)
                meta.input_token_logprobs, meta.input_top_logprobs = prompt or (None, None)
        ids = self._request.tokens[self._told : upto]
        self._told = max(self._told, upto)
        if piece or ids:
            self._on_piece(piece, ids, meta)


def finish_reason(finish: Finish) -> FinishReason:
    matched = finish.matched
    if isinstance(matched, bytes):
        matched = matched.decode("utf-8", "replace")
    return FinishReason(finish.reason, matched, finish.message)


def pieces_for(on_delta: OnDelta | None) -> OnPiece | None:
    """What tells a program of text and log-probs as they come."""
    return None if on_delta is None else lambda text, _, meta: on_delta(text, meta)


async def all_of(jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run at the same time; when one fails, the others are cancelled and its error is raised. A
    single one needs no task."""
    if len(jobs) == 1:
        return [await jobs[0]]
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return [await task for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
