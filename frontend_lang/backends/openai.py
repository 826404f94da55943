"""Programs against any server that speaks OpenAI's API at ``/v1``."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from typing import Any, Literal

from ramet.runtime.program.executor import GenResult, OnDelta, SelectResult
from ramet.runtime.program.instructions import ChoicesMethod
from ramet.runtime.protocol import BackendError, BadInputError, ProgramError, SamplingParams

from . import _loop
from .local import LocalBackend
from .openai_constraint import check_kept
from .openai_http import OpenAIClient
from .openai_wire import Sample, request_fields, samples_of

DEFAULT_URL = "https://api.openai.com/v1"
Message = dict[str, str]


class OpenAI(LocalBackend):
    """Runs programs here, and each generation there.

    A program with roles uses chat completions, one without uses completions; ``is_chat_model=True``
    sends the text of the latter as one user message. ``model`` None takes the first that the server
    lists; the key comes from ``OPENAI_API_KEY`` when it is not given. Replies of status 429 and 5xx
    and broken connections are tried again ``max_retries`` times. ``timeout`` (seconds) is for each
    read from the server.

    `select` scores where completions can echo log-probs; elsewhere the server is asked to answer
    with one of the choices, constrained by a JSON schema where it knows them.
    """

    def __init__(
        self,
        model: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        is_chat_model: bool | None = None,
        timeout: float = 600.0,
        max_retries: int = 4,
    ) -> None:
        url = base_url or os.environ.get("OPENAI_BASE_URL") or DEFAULT_URL
        if not url.startswith(("http://", "https://")):
            raise BadInputError(f"base_url {url!r} is no http URL", param="base_url")
        client = OpenAIClient(
            url, api_key or os.environ.get("OPENAI_API_KEY"), timeout, max_retries
        )
        super().__init__(OpenAIExecutor(client, model, is_chat_model))
        self.max_in_flight = 96  # each holds a connection
        self.client = client

    def server_info(self) -> dict[str, Any]:
        """The models that the server lists."""
        listed = _loop.run(self.client.get("/models"))
        return {"model": None, "models": [model["id"] for model in listed.get("data", ())]}

    def shutdown(self) -> None:
        _loop.run(self.client.close())


class OpenAIExecutor:
    """Opens contexts that talk to one server. ``can_echo`` is learnt at the first `select`."""

    def __init__(self, client: OpenAIClient, model: str | None, is_chat: bool | None) -> None:
        self.client = client
        self.is_chat = is_chat
        self.can_echo: bool | None = None
        self.can_constrain: bool | None = None
        self._model = model
        self._asked = asyncio.Lock()

    def open(self, program: int, cache_salt: str | None = None) -> OpenAIContext:
        del program, cache_salt
        return OpenAIContext(self)

    async def model(self) -> str:
        """The model's name, asked for once when it was not given."""
        async with self._asked:
            if self._model is None:
                listed = await self.client.get("/models")
                models: list[dict[str, Any]] = listed.get("data") or []
                if not models:
                    raise BackendError(f"{self.client.base_url}/models lists no model")
                self._model = str(models[0]["id"])
            return self._model


class OpenAIContext:
    """One stream: either a raw text or chat messages, of which the last may be open.

    The template's markers are the server's affair; in the program's text a message shows as
    ``ROLE: content`` and a line break.
    """

    def __init__(self, executor: OpenAIExecutor) -> None:
        self.executor = executor
        self.raw = ""
        self.messages: list[Message] = []
        self.role: str | None = None
        self.content = ""

    def append(self, text: str) -> None:
        if self.role is None:
            self.raw += text
        else:
            self.content += text

    def role_begin(self, role: str) -> str:
        self.role, self.content = role, ""
        return f"{role.upper()}: "

    def role_end(self, role: str) -> str:
        self.messages.append({"role": role, "content": self.content})
        self.role, self.content = None, ""
        return "\n"

    def fork(self) -> OpenAIContext:
        child = OpenAIContext(self.executor)
        child.raw, child.role, child.content = self.raw, self.role, self.content
        child.messages = list(self.messages)
        return child

    async def gen(
        self, sampling: SamplingParams, name: str | None, on_delta: OnDelta | None
    ) -> list[GenResult]:
        path, body = self.request(sampling)
        body["model"] = await self.executor.model()
        try:
            results = await self.complete(path, body, sampling.n, on_delta)
        except BadInputError as error:
            if "continue_final_message" in body and "continue_final" in error.message:
                raise BadInputError(
                    f"{name or 'a gen'} follows text in its assistant message, and this server "
                    f"cannot continue a message: {error.message}"
                ) from None
            raise
        if sampling.constraint is not None:
            for result in results:
                check_kept(sampling.constraint, result)
        self.append(results[0].text)
        return results

    async def select(
        self,
        choices: Sequence[str],
        method: ChoicesMethod,
        boundary: Literal["exact", "plain"],
        name: str | None,
    ) -> SelectResult:
        from .openai_select import select

        result = await select(self, list(choices), method, boundary, name)
        self.append(choices[result.index])
        return result

    async def warm(self) -> None:
        """A server of this kind caches what it likes."""

    def warnings(self) -> list[tuple[str, str]]:
        return []

    def close(self) -> None:
        """Nothing is held between requests."""

    # --- requests ---------------------------------------------------------------------------------

    @property
    def chats(self) -> bool:
        """Whether the next request goes to chat completions."""
        return bool(self.messages or self.role is not None or self.executor.is_chat)

    def request(self, sampling: SamplingParams) -> tuple[str, dict[str, Any]]:
        """Path and body, but for the model. Raises `ProgramError` for what cannot be asked."""
        fields = request_fields(sampling, self.chats)
        if not self.chats:
            return "/completions", {"prompt": self.raw, **fields}
        fields["messages"] = messages = self.chat()
        if self.role == "assistant" and self.content:
            messages.append({"role": "assistant", "content": self.content})
            fields["continue_final_message"] = True
            fields["add_generation_prompt"] = False
        return "/chat/completions", fields

    def chat(self) -> list[Message]:
        """The closed messages, before which an answer of the assistant can be asked for."""
        if self.executor.is_chat is False:
            raise ProgramError("this backend was made with is_chat_model=False; roles need a chat")
        if self.messages or self.role is not None:
            if self.raw.strip():
                raise ProgramError(
                    "a chat cannot hold text outside of its messages: "
                    f"{self.raw.strip()[:40]!r}; put it into system(), user() or assistant()"
                )
            if self.role != "assistant":
                inside = f"a {self.role} message" if self.role else "no message"
                raise ProgramError(
                    f"a chat server can only write assistant messages; this stands in {inside}"
                )
            return list(self.messages)
        return [{"role": "user", "content": self.raw}]

    async def complete(
        self, path: str, body: dict[str, Any], count: int, on_delta: OnDelta | None = None
    ) -> list[GenResult]:
        """Send a request for ``count`` samples; the pieces of the first go to ``on_delta``."""
        client = self.executor.client
        url = client.base_url + path
        began = time.monotonic()
        samples = [Sample() for _ in range(count)]
        usage: dict[str, Any] = {}
        request_id = ""
        if on_delta is None:
            reply = await client.post(path, body)
            samples_of(reply, samples, url)
            usage = reply.get("usage") or usage
            request_id = reply.get("id") or ""
        else:
            body = {**body, "stream": True, "stream_options": {"include_usage": True}}
            async for chunk in client.stream(path, body):
                piece = samples_of(chunk, samples, url)
                usage = chunk.get("usage") or usage
                request_id = chunk.get("id") or request_id
                if piece:
                    on_delta(piece, None)
        if any(sample.reason is None for sample in samples):
            raise BackendError(f"POST {url}: the reply ended without a finish reason")
        return [sample.result(request_id, usage, began) for sample in samples]
