"""Generating without the language: a prompt, or a list of them, in; SGLang's reply dicts out."""

from __future__ import annotations

import asyncio
import functools
import queue
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Protocol

from ramet.runtime.protocol import BadInputError, ErrorInfo, MetaInfo
from ramet.runtime.protocol.messages import AbortGenerate, Generate, Generated

from . import _loop
from .base import Backend
from .prompts import Jobs, OnGenerated, jobs_for

Reply = dict[str, Any]
Tell = Callable[[int, Generated | ErrorInfo], object]


class Line(Protocol):
    """What requests go over, in the IO loop. ``lost`` says why it is of no more use; ``requests``
    holds who is told of each."""

    lost: ErrorInfo | None
    requests: dict[str, OnGenerated]

    def send(self, message: Generate | AbortGenerate, /) -> None: ...


class GeneratingBackend(Backend):
    """What backends with a ramet server behind them offer beside programs."""

    @abstractmethod
    def connection(self) -> Line:
        """The living connection. Raises `BackendError` when there is none to be had."""

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        sampling_params: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        stream: bool = False,
        rid: str | Sequence[str] | None = None,
        cache_salt: str | None = None,
        explain: bool = False,
    ) -> Any:
        """Continue a text, in which special tokens are parsed, or token ids, used as they are.

        Returns ``{"text", "output_ids", "meta_info"}``; for a list of prompts and for ``n`` > 1 a
        list of those. ``max_new_tokens`` 0 scores the prompt only. With ``stream`` an iterator: an
        item holds all of the text and ids so far (with an ``index`` where there are several).
        ``explain``: the reply's ``meta_info["explain"]`` says where the prompt left the cache.

        Raises `BadInputError`, `ContextLengthError`, `BackendError`; Ctrl-C aborts the request.
        """
        jobs = jobs_for(
            prompt, input_ids, sampling_params, return_logprob, logprob_start_len,
            top_logprobs_num, stream, rid, cache_salt, explain,
        )  # fmt: skip
        replies = _Replies(jobs)
        if not stream and self.answered(jobs, replies.take):
            return replies.result()
        connection = self.connection()
        pieces: queue.SimpleQueue[tuple[int, Generated | ErrorInfo]] = queue.SimpleQueue()

        def tell(index: int, piece: Generated | ErrorInfo) -> None:
            pieces.put((index, piece))

        _loop.soon(_start, connection, jobs, tell)
        if stream:
            return _stream(connection, jobs, pieces)
        try:
            while not replies.complete:
                replies.take(*pieces.get())
        except BaseException:
            _abort(connection, jobs)
            raise
        return replies.result()

    def answered(self, jobs: Jobs, tell: Tell) -> bool:
        """Have requests answered in this thread, if there is such a way; ``tell`` of each. Raises
        as `generate` does."""
        del jobs, tell
        return False

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        sampling_params: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        stream: bool = False,
        rid: str | Sequence[str] | None = None,
        cache_salt: str | None = None,
        explain: bool = False,
    ) -> Any:
        """As `generate`, for asyncio; ``stream`` gives an async iterator. Cancelling aborts."""
        jobs = jobs_for(
            prompt, input_ids, sampling_params, return_logprob, logprob_start_len,
            top_logprobs_num, stream, rid, cache_salt, explain,
        )  # fmt: skip
        connection = self.connection()
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[tuple[int, Generated | ErrorInfo]] = asyncio.Queue()

        def tell(index: int, piece: Generated | ErrorInfo) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, (index, piece))

        _loop.soon(_start, connection, jobs, tell)
        if stream:
            return _stream_async(connection, jobs, pieces)
        replies = _Replies(jobs)
        try:
            while not replies.complete:
                replies.take(*await pieces.get())
        except BaseException:
            _abort(connection, jobs)
            raise
        return replies.result()

    def abort(self, rid: str) -> None:
        """Abort exactly the request with this id; its caller gets an `AbortedError`."""
        if not isinstance(rid, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BadInputError(f"rid must be a string, not {rid!r}", param="rid")
        _loop.soon(self.connection().send, AbortGenerate(rid=rid))


class _Replies:
    """Puts pieces of several requests together into replies."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._replies: list[list[Reply]] = [[] for _ in jobs.messages]
        self._open = len(jobs.messages)

    @property
    def complete(self) -> bool:
        return self._open == 0

    def take(self, index: int, piece: Generated | ErrorInfo) -> list[Reply]:
        """Add a piece; returns the replies that it changed. Raises what failed."""
        if isinstance(piece, ErrorInfo):
            raise piece.exception()
        replies = self._replies[index]
        if not replies:
            replies.extend({"text": "", "output_ids": [], "meta_info": {}} for _ in piece.texts)
        changed: list[Reply] = []
        for reply, text, ids, meta in zip(replies, piece.texts, piece.output_ids, piece.metas):
            reply["text"] += text
            reply["output_ids"] = [*reply["output_ids"], *ids]
            _merge(reply["meta_info"], meta, piece.done)
            if not piece.done:
                reply["meta_info"]["completion_tokens"] = len(reply["output_ids"])
            if text or ids or piece.done:
                changed.append(reply)
        if piece.done:
            self._open -= 1
        return changed

    def result(self) -> Any:
        flat = [reply for replies in self._replies for reply in replies]
        return flat if self._jobs.many or len(flat) != 1 else flat[0]

    def shown(self, index: int, reply: Reply) -> Reply:
        """A copy of a streamed reply, with its index where there are several."""
        out = {**reply, "meta_info": dict(reply["meta_info"])}
        if self._jobs.many or len(self._replies[index]) > 1:
            before = sum(len(replies) or 1 for replies in self._replies[:index])
            place = next(i for i, r in enumerate(self._replies[index]) if r is reply)
            out["index"] = before + place
        return out


_LISTS = (
    "input_token_logprobs",
    "output_token_logprobs",
    "input_top_logprobs",
    "output_top_logprobs",
)


def _merge(known: dict[str, Any], meta: MetaInfo, done: bool) -> None:
    """Lists of log-probs grow piece by piece; the end of a request holds all of them."""
    new = meta.as_dict()
    for name in _LISTS:
        if name in known and name in new and not done:
            new[name] = [*known[name], *new[name]]
    known.update(new)


def _start(connection: Line, jobs: Jobs, tell: Tell) -> None:
    for index, message in enumerate(jobs.messages):
        if connection.lost is not None:
            tell(index, connection.lost)
        elif message.rid in connection.requests:
            tell(index, ErrorInfo("bad_input", f"rid {message.rid!r} is in use", param="rid"))
        else:
            jobs.waiting[message.rid] = functools.partial(tell, index)
            connection.requests[message.rid] = jobs.waiting[message.rid]
            try:
                connection.send(message)
            except Exception as error:
                connection.requests.pop(message.rid, None)
                tell(index, ErrorInfo.of(error))


def _abort(connection: Line, jobs: Jobs) -> None:
    """Abort those of the jobs that still run."""

    def work() -> None:
        for rid, tell in jobs.waiting.items():
            if connection.requests.get(rid) is tell:
                del connection.requests[rid]
                connection.send(AbortGenerate(rid=rid))

    _loop.soon(work)


def _stream(
    connection: Line,
    jobs: Jobs,
    pieces: queue.SimpleQueue[tuple[int, Generated | ErrorInfo]],
) -> Iterator[Reply]:
    replies = _Replies(jobs)
    try:
        while not replies.complete:
            index, piece = pieces.get()
            for reply in replies.take(index, piece):
                yield replies.shown(index, reply)
    finally:
        if not replies.complete:
            _abort(connection, jobs)


async def _stream_async(
    connection: Line,
    jobs: Jobs,
    pieces: asyncio.Queue[tuple[int, Generated | ErrorInfo]],
) -> AsyncIterator[Reply]:
    replies = _Replies(jobs)
    try:
        while not replies.complete:
            index, piece = await pieces.get()
            for reply in replies.take(index, piece):
                yield replies.shown(index, reply)
    finally:
        if not replies.complete:
            _abort(connection, jobs)
