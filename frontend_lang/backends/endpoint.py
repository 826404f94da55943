"""`RuntimeEndpoint`: a server that runs already, by its URL."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from ramet.runtime.protocol import BadInputError

from .base import Backend

ZMQ_PORT = 7411


def RuntimeEndpoint(  # noqa: N802 - SGLang's name, a class there
    url: str, api_key: str | None = None, **options: Any
) -> Backend:
    """A backend for ``tcp://host:port`` or ``ipc://path`` (a ramet server), or for
    ``http://host:port`` (any OpenAI-compatible server, at its ``/v1``).

    Options of the first: ``server_key`` (its CURVE public key), ``timeout`` (seconds to connect).
    Raises `BackendError` where nothing answers, `BadInputError` for another kind of URL.
    """
    parts = urlsplit(url)
    if parts.scheme in ("http", "https"):
        from .openai import OpenAI

        base = url.rstrip("/")
        return OpenAI(None, base if base.endswith("/v1") else base + "/v1", api_key, **options)
    if parts.scheme in ("tcp", "ipc"):
        from .remote import RemoteBackend

        if parts.scheme == "tcp" and parts.port is None:
            url = f"{url.rstrip('/')}:{ZMQ_PORT}"
        return RemoteBackend(url, api_key, **options)
    raise BadInputError(
        f"{url!r} is no endpoint: tcp://host:port, ipc://path or http://host:port", param="url"
    )
