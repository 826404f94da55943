"""Generating over HTTP: the messages that a connection takes, as requests for ``/generate``."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import Any

import msgspec
from ramet.runtime.protocol import AbortedError, BackendError, ErrorInfo, MetaInfo
from ramet.runtime.protocol.messages import AbortGenerate, Generate, Generated

from .openai_http import OpenAIClient
from .prompts import OnGenerated

_PATH = "/generate"


class _Reply(msgspec.Struct):
    """One sample. While it streams, each holds all so far."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int = 0


class HttpConnection:
    """Stands where a connection over ZMQ would. Lives in the IO loop."""

    def __init__(self, client: OpenAIClient) -> None:
        self.lost: ErrorInfo | None = None
        self.requests: dict[str, OnGenerated] = {}
        self._client = client
        self._tasks: dict[str, asyncio.Task[Generated | ErrorInfo]] = {}

    def send(self, message: Generate | AbortGenerate, /) -> None:
        if isinstance(message, AbortGenerate):
            if (task := self._tasks.get(message.rid)) is not None:
                task.cancel()  # the server aborts what nobody waits for
            return
        task = asyncio.get_running_loop().create_task(self._run(message))
        self._tasks[message.rid] = task
        task.add_done_callback(functools.partial(self._ended, message.rid))

    async def _run(self, message: Generate) -> Generated | ErrorInfo:
        try:
            return await (self._stream(message) if message.stream else self._whole(message))
        except Exception as error:
            return ErrorInfo.of(error)

    def _ended(self, rid: str, task: asyncio.Task[Generated | ErrorInfo]) -> None:
        """Also of a task that was cancelled before its first step."""
        if self._tasks.get(rid) is task:
            del self._tasks[rid]
        aborted = ErrorInfo.of(AbortedError("the request was aborted"))
        end = aborted if task.cancelled() else task.result()
        tell = self.requests.pop(rid, None)
        if tell is not None:
            tell(end)

    async def _whole(self, message: Generate) -> Generated:
        data = await self._client.raw("POST", _PATH, _body(message))
        try:
            replies = msgspec.json.decode(data, type=_Reply | list[_Reply])
        except msgspec.DecodeError as error:
            raise BackendError(f"{self._client.base_url}{_PATH}: {error}") from None
        samples = [replies] if isinstance(replies, _Reply) else replies
        return Generated(
            rid=message.rid,
            texts=[sample.text for sample in samples],
            output_ids=[sample.output_ids for sample in samples],
            metas=[sample.meta_info for sample in samples],
        )

    async def _stream(self, message: Generate) -> Generated:
        count = int(message.sampling.get("n") or 1)
        known = [_Reply("", [], MetaInfo()) for _ in range(count)]
        async with contextlib.aclosing(self._client.data(_PATH, _body(message))) as lines:
            async for data in lines:
                try:
                    reply = msgspec.json.decode(data, type=_Reply)
                except msgspec.DecodeError:
                    raise BackendError(f"{self._client.base_url}{_PATH}: {data[:500]}") from None
                before, known[reply.index] = known[reply.index], reply
                tell = self.requests.get(message.rid)
                if tell is not None:
                    tell(_piece(message.rid, count, before, reply))
        return Generated(
            rid=message.rid,
            texts=[""] * count,
            output_ids=[[] for _ in known],
            metas=[reply.meta_info for reply in known],
        )


def _piece(rid: str, count: int, before: _Reply, now: _Reply) -> Generated:
    """What is new of one sample."""
    texts = [""] * count
    texts[now.index] = now.text[len(before.text) :]
    ids: list[list[int]] = [[] for _ in range(count)]
    ids[now.index] = now.output_ids[len(before.output_ids) :]
    metas = [MetaInfo(id=rid) for _ in range(count)]
    entries = now.meta_info.output_token_logprobs
    if entries:
        seen = len(before.meta_info.output_token_logprobs or ())
        metas[now.index].output_token_logprobs = entries[seen:]
    return Generated(rid=rid, texts=texts, output_ids=ids, metas=metas, done=False)


def _body(message: Generate) -> dict[str, Any]:
    ids = message.input_ids
    if isinstance(ids, bytes):
        ids = memoryview(ids).cast("i").tolist()
    prompt = {"text": message.prompt} if message.prompt is not None else {"input_ids": ids}
    return {
        **prompt,
        "sampling_params": message.sampling,
        "rid": message.rid,
        "stream": message.stream,
        "cache_salt": message.cache_salt,
        "return_text_in_logprobs": True,
        "explain": message.explain,
    }
