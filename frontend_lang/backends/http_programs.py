"""Programs that run in a ramet server, reached over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from typing import Any

import msgspec
from ramet.runtime.program.events import Event
from ramet.runtime.program.instructions import Instruction, Program
from ramet.runtime.protocol import BackendError, BadInputError, ErrorInfo, RametError

from . import _loop
from .base import Opening, Session
from .generation import GeneratingBackend
from .http_generation import HttpConnection
from .openai_http import HttpError, OpenAIClient

SERVER = "ramet"
_PROGRAMS = "/v1/programs"
_SCORES = ("normalized_prompt_logprobs", "normalized_unconditional_prompt_logprobs")

_events: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


class HttpBackend(GeneratingBackend):
    """Talks to one server. Each running program holds one connection; what is appended goes over
    others. Slower than ``tcp://``, but it passes wherever HTTP does.

    ``info`` is what the server says of its model (`ask_info`). ``timeout`` (seconds) is for each
    read; replies of status 429 and 5xx are tried again ``max_retries`` times.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        info: dict[str, Any],
        timeout: float = 600.0,
        max_retries: int = 4,
    ) -> None:
        self.address = url
        self.max_in_flight = 96  # each holds a connection
        self._info = info
        self._client = OpenAIClient(url, api_key, timeout, max_retries)
        self._connection = HttpConnection(self._client)

    @property
    def model(self) -> str:
        """The name of the model that runs there."""
        return str(self._info.get("served_model_name", ""))

    @property
    def context_length(self) -> int:
        """How many tokens a prompt and its answer may have together."""
        return int(self._info.get("max_model_len", 0))

    def connection(self) -> HttpConnection:
        self._check()
        return self._connection

    def open(self, opening: Opening) -> Session:
        self._check()
        return HttpSession(self._client, opening)

    def flush_cache(self) -> None:
        _loop.run(self._client.raw("POST", "/flush_cache"))

    def server_info(self) -> dict[str, Any]:
        return _loop.run(self._client.get("/server_info"))

    def explain(
        self, prompt: str, other: str | None = None, *, cache_salt: str | None = None
    ) -> dict[str, Any]:
        body = {"prompt": prompt, "other": other, "cache_salt": cache_salt}
        return _loop.run(self._client.post("/v1/cache/explain", body))

    def shutdown(self) -> None:
        if self._connection.lost is None:
            why = f"this backend ({self.address}) was shut down"
            self._connection.lost = ErrorInfo("backend", why)
            _loop.run(self._client.close())

    def _check(self) -> None:
        if self._connection.lost is not None:
            raise self._connection.lost.exception()


def ask_info(url: str, api_key: str | None) -> dict[str, Any] | None:
    """What a ramet server says of its model; ``None`` for another kind of server. Raises
    `BackendError` where nothing answers."""
    client = OpenAIClient(url, api_key, 10.0, 0)

    async def ask() -> dict[str, Any] | None:
        try:
            data = await client.raw("GET", "/get_model_info")
        except BadInputError:
            return None
        except HttpError as error:
            if error.status in (404, 405):
                return None
            raise
        finally:
            await client.close()
        try:
            info = msgspec.json.decode(data, type=dict[str, Any])
        except msgspec.DecodeError:
            return None
        return info if info.get("server") == SERVER else None

    return _loop.run(ask())


class HttpSession(Session):
    """One program: one request streams its events, others append to it. All but the two methods of
    a session happens in the IO loop."""

    def __init__(self, client: OpenAIClient, opening: Opening) -> None:
        super().__init__()
        self._client = client
        self._opening = opening
        self._unsent: list[Instruction] = []
        self._closed = False
        self._more = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def send(self, instructions: Sequence[Instruction], closed: bool) -> None:
        _loop.soon(self._take, list(instructions), closed)

    def cancel(self) -> None:
        _loop.soon(self._stop)

    def _take(self, instructions: list[Instruction], closed: bool) -> None:
        self._unsent += instructions
        self._closed = self._closed or closed
        self._more.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def _stop(self) -> None:
        """The server aborts what nobody reads."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            await self._read(self._body())
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self.store.fail(ErrorInfo.of(error))

    def _body(self) -> dict[str, Any]:
        opening = self._opening
        unsent, self._unsent = self._unsent, []
        program = opening.registered or Program(instructions=tuple(unsent), name=opening.name)
        self._more.clear()
        return {
            "program": msgspec.to_builtins(program),
            "args": opening.args,
            "sampling": opening.sampling,
            "stream": True,
            "deltas": opening.stream,
            "closed": self._closed,
            "cache_salt": opening.cache_salt,
        }

    async def _read(self, body: dict[str, Any]) -> None:
        writer: asyncio.Task[None] | None = None
        whole = bool(body["closed"])
        try:
            async with contextlib.aclosing(self._client.data(_PROGRAMS, body)) as lines:
                opened = msgspec.json.decode(await anext(lines))
                if not whole:
                    path = f"{_PROGRAMS}/{opened['id']}/append"
                    loop = asyncio.get_running_loop()
                    writer = loop.create_task(self._append(path, float(opened["lease"])))
                async for data in lines:
                    self.store.feed([_decoded(data)])
            if not self.store.done:
                raise BackendError(f"{self._client.base_url}: the program's events broke off")
        finally:
            if writer is not None:
                writer.cancel()

    async def _append(self, path: str, lease: float) -> None:
        """Send what comes, in order; without any, now and then nothing, which keeps the lease."""
        closed = False
        while not closed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._more.wait(), lease / 3)
            self._more.clear()
            unsent, self._unsent = self._unsent, []
            closed = self._closed
            body = {"instructions": msgspec.to_builtins(unsent), "closed": closed}
            try:
                await self._client.raw("POST", path, body)
            except HttpError as error:
                if error.status == 404:  # it has ended, as its last event says
                    return
                self._failed(error)
                return
            except RametError as error:
                self._failed(error)
                return

    def _failed(self, error: RametError) -> None:
        self.store.fail(ErrorInfo.of(error))
        self._stop()


def _decoded(data: str) -> Event:
    """An event. JSON has no NaN: a score that is none comes as null."""
    try:
        return _events.decode(data)
    except msgspec.ValidationError:
        plain: dict[str, Any] = msgspec.json.decode(data)
        meta: Any = plain.get("meta") or {}
        for choice in meta.get("choices") or ():
            for name in _SCORES:
                if name in choice and choice[name] is None:
                    choice[name] = math.nan
        return msgspec.convert(plain, Event)  # pyright: ignore
