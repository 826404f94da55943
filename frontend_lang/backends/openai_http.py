"""HTTP to an OpenAI-compatible server: retries, server-sent events, errors that name the URL."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from ramet.runtime.protocol import BackendError, BadInputError, ContextLengthError, RametError
from ramet.runtime.protocol.codec import half_character

if TYPE_CHECKING:
    import httpx

RETRIED = frozenset({408, 409, 429, 500, 502, 503, 504})
FIRST_WAIT_SECONDS = 0.5
LONGEST_WAIT_SECONDS = 20.0


class HttpError(BackendError):
    """The server answered with an error; ``status`` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class OpenAIClient:
    """Used from the IO loop only. Every error names the URL and the status."""

    def __init__(
        self, base_url: str, api_key: str | None, timeout: float, max_retries: int
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._api_key = api_key
        self._timeout = timeout
        self._max_retries = max_retries
        self._client: httpx.AsyncClient | None = None
        self._pid = 0

    def _http(self) -> httpx.AsyncClient:
        if self._client is None or self._pid != os.getpid():  # after a fork, it is the parent's
            self._pid = os.getpid()
            import httpx

            headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            timeout = httpx.Timeout(self._timeout, connect=10.0)
            self._client = httpx.AsyncClient(headers=headers, limits=limits, timeout=timeout)
        return self._client

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def get(self, path: str) -> dict[str, Any]:
        """The JSON that a GET answers."""
        async with self._request("GET", path, None, whole=True) as response:
            return _json(response.content, self._url(path))

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON that a POST answers."""
        async with self._request("POST", path, body, whole=True) as response:
            return _json(response.content, self._url(path))

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a server-sent stream. A stream that breaks off is a `BackendError`."""
        url = self._url(path)
        async for data in self.data(path, body):
            chunk = _json(data.encode(), url)
            if "error" in chunk:
                raise BackendError(f"POST {url}: {_reason(chunk)}")
            yield chunk

    async def data(self, path: str, body: dict[str, Any]) -> AsyncGenerator[str]:
        """The same as the server sends it, whatever it means."""
        import httpx

        url = self._url(path)
        async with self._request("POST", path, body) as response:
            try:
                async for line in response.aiter_lines():
                    data = line[5:].strip() if line.startswith("data:") else ""
                    if data == "[DONE]":
                        return
                    if data:
                        yield data
            except httpx.HTTPError as error:
                raise BackendError(f"POST {url}: the stream broke off: {error!r}") from None

    async def raw(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        """The body of an answer."""
        async with self._request(method, path, body, whole=True) as response:
            return response.content

    def _url(self, path: str) -> str:
        return self.base_url + path

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None, whole: bool = False
    ) -> AsyncGenerator[httpx.Response]:
        """A response of status 2xx, with ``whole`` read to its end; tried again, with growing
        waits, where that may help."""
        import httpx

        url = self._url(path)
        client = self._http()
        for attempt in range(self._max_retries + 1):
            last = attempt == self._max_retries
            try:
                request = client.build_request(method, url, json=body)
            except UnicodeEncodeError as error:
                raise half_character(error) from None
            try:
                response = await client.send(request, stream=not whole)
            except httpx.TransportError as error:
                if last:
                    what = f"{type(error).__name__}: {error}".rstrip(": ")
                    raise BackendError(
                        f"{method} {url}: no answer after {attempt + 1} tries: {what}"
                    ) from None
                await asyncio.sleep(_wait(attempt, None))
                continue
            try:
                if response.is_success:
                    yield response
                    return
                if last or response.status_code not in RETRIED:
                    raise _error(method, url, response.status_code, await response.aread())
                wait = _wait(attempt, response.headers.get("retry-after"))
            finally:
                await response.aclose()
            await asyncio.sleep(wait)


def _wait(attempt: int, retry_after: str | None) -> float:
    """Seconds before the next try: what the server asks for, or doubling with some chance."""
    try:
        if retry_after is not None:
            return min(float(retry_after), LONGEST_WAIT_SECONDS)
    except ValueError:
        pass  # a date; rarely used, and the doubling wait does as well
    full = min(FIRST_WAIT_SECONDS * 2**attempt, LONGEST_WAIT_SECONDS)
    return full * (0.5 + 0.5 * random.random())


def _json(data: bytes, url: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        raise BackendError(f"{url} did not answer with JSON: {data[:100]!r}") from None
    if not isinstance(value, dict):
        raise BackendError(f"{url} did not answer with a JSON object: {data[:100]!r}")
    return value  # pyright: ignore[reportUnknownVariableType]


def _reason(body: dict[str, Any]) -> str:
    error: Any = body.get("error", body)
    if isinstance(error, dict):
        error = error.get("message", error)  # pyright: ignore
    return str(error)[:500]  # pyright: ignore


def _error(method: str, url: str, status: int, data: bytes) -> RametError:
    try:
        reason = _reason(json.loads(data))
    except (ValueError, AttributeError):
        reason = data[:300].decode("utf-8", "replace")
    message = f"{method} {url}: HTTP {status}: {reason}"
    if status in (400, 413, 422):
        length = "context_length" in data.decode("utf-8", "replace") or "context length" in reason
        return ContextLengthError(message) if length else BadInputError(message)
    return HttpError(message, status)
