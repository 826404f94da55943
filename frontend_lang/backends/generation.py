"""Generating without the language: a prompt, or a list of them, in; SGLang's reply dicts out."""

from __future__ import annotations

import asyncio
import functools
import queue
import secrets
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec
from ramet.runtime.protocol import BadInputError, ErrorInfo, MetaInfo, sampling_from
from ramet.runtime.protocol.messages import AbortGenerate, Generate, Generated

from . import _loop
from .base import Backend

if TYPE_CHECKING:
    from .connection import Connection

Reply = dict[str, Any]
OnGenerated = Callable[[Generated | ErrorInfo], None]
Tell = Callable[[int, Generated | ErrorInfo], None]


class GeneratingBackend(Backend):
    """What backends with a ramet server behind them offer beside programs."""

    @abstractmethod
    def connection(self) -> Connection:
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
    ) -> Any:
        """Continue a text, in which special tokens are parsed, or token ids, used as they are.

        Returns ``{"text", "output_ids", "meta_info"}``; for a list of prompts and for ``n`` > 1 a
        list of those. ``max_new_tokens`` 0 scores the prompt only. With ``stream`` an iterator: an
        item holds all of the text and ids so far (with an ``index`` where there are several).

        Raises `BadInputError`, `ContextLengthError`, `BackendError`; Ctrl-C aborts the request.
        """
        jobs = _jobs(
            prompt, input_ids, sampling_params, return_logprob, logprob_start_len,
            top_logprobs_num, stream, rid, cache_salt,
        )  # fmt: skip
        connection = self.connection()
        pieces: queue.SimpleQueue[tuple[int, Generated | ErrorInfo]] = queue.SimpleQueue()

        def tell(index: int, piece: Generated | ErrorInfo) -> None:
            pieces.put((index, piece))

        _loop.soon(_start, connection, jobs, tell)
        if stream:
            return _stream(connection, jobs, pieces)
        replies = _Replies(jobs)
        try:
            while not replies.complete:
                replies.take(*pieces.get())
        except BaseException:
            _abort(connection, jobs)
            raise
        return replies.result()

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
    ) -> Any:
        """As `generate`, for asyncio; ``stream`` gives an async iterator. Cancelling aborts."""
        jobs = _jobs(
            prompt, input_ids, sampling_params, return_logprob, logprob_start_len,
            top_logprobs_num, stream, rid, cache_salt,
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
        _loop.soon(self.connection().send, AbortGenerate(rid=rid))


class _Jobs(msgspec.Struct):
    """The requests of one call; ``waiting`` are those that were sent, with who is told of them."""

    messages: list[Generate]
    many: bool
    waiting: dict[str, OnGenerated] = {}


class _Replies:
    """Puts pieces of several requests together into replies."""

    def __init__(self, jobs: _Jobs) -> None:
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


def _jobs(
    prompt: str | Sequence[str] | None,
    input_ids: Sequence[int] | Sequence[Sequence[int]] | None,
    sampling_params: dict[str, Any] | Sequence[dict[str, Any]] | None,
    return_logprob: bool,
    logprob_start_len: int,
    top_logprobs_num: int,
    stream: bool,
    rid: str | Sequence[str] | None,
    cache_salt: str | None,
) -> _Jobs:
    """One message a prompt, checked. Raises `BadInputError` naming what was wrong."""
    prompts, many = _prompts(prompt, input_ids)
    samplings = _spread(sampling_params, len(prompts), "sampling_params", dict)
    rids = _spread(rid, len(prompts), "rid", str)
    if many and isinstance(rid, str):
        raise BadInputError("a list of prompts needs a list of rids", param="rid")
    extra: dict[str, Any] = {}
    if return_logprob or top_logprobs_num:
        extra["return_logprob"] = True
        extra["logprob_start_len"] = logprob_start_len
        extra["top_logprobs_num"] = top_logprobs_num
    messages: list[Generate] = []
    for given, sampling, name in zip(prompts, samplings, rids):
        own: dict[str, Any] = dict(sampling or {})
        merged = {**extra, **{k: v for k, v in own.items() if v is not None}}
        sampling_from(merged)
        messages.append(
            Generate(
                rid=name if name is not None else secrets.token_hex(12),
                prompt=given if isinstance(given, str) else None,
                input_ids=None if isinstance(given, str) else given,
                sampling=merged,
                stream=stream,
                cache_salt=cache_salt,
            )
        )
    if len({message.rid for message in messages}) < len(messages):
        raise BadInputError("the same rid is given twice", param="rid")
    return _Jobs(messages, many)


def _prompts(prompt: Any, input_ids: Any) -> tuple[list[str | list[int]], bool]:
    if (prompt is None) == (input_ids is None):
        raise BadInputError("give either prompt or input_ids", param="prompt")
    if prompt is not None:
        if isinstance(prompt, str):
            return [prompt], False
        texts = list(prompt)
        if not all(isinstance(text, str) for text in texts):
            raise BadInputError("prompt must be a string or a list of strings", param="prompt")
        return cast("list[str | list[int]]", texts), True
    try:
        rows = list(input_ids)
        if rows and not hasattr(rows[0], "__len__"):
            return [[_id(token) for token in rows]], False
        if not rows:
            raise BadInputError("input_ids is empty", param="input_ids")
        return [[_id(token) for token in row] for row in rows], True
    except TypeError:
        raise BadInputError(
            "input_ids must be a list of token ids or a list of such lists", param="input_ids"
        ) from None


def _id(token: Any) -> int:
    if isinstance(token, (str, bytes, float)):
        raise TypeError
    return int(token)


def _spread(value: Any, count: int, name: str, one: type) -> list[Any]:
    """A value for each prompt, from one for all or a list with one each."""
    if value is None or isinstance(value, one):
        return [value] * count
    values = list(value)
    if len(values) != count:
        raise BadInputError(f"{len(values)} {name} for {count} prompts", param=name)
    return values


def _start(connection: Connection, jobs: _Jobs, tell: Tell) -> None:
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


def _abort(connection: Connection, jobs: _Jobs) -> None:
    """Abort those of the jobs that still run."""

    def work() -> None:
        for rid, tell in jobs.waiting.items():
            if connection.requests.get(rid) is tell:
                del connection.requests[rid]
                connection.send(AbortGenerate(rid=rid))

    _loop.soon(work)


def _stream(
    connection: Connection,
    jobs: _Jobs,
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
    connection: Connection,
    jobs: _Jobs,
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
