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
    ``http://host:port``: a ramet server takes whole programs there too; of any other, and of a
    URL that ends in ``/v1``, OpenAI's API is used.

    Options of the first: ``server_key`` (its CURVE public key), ``timeout`` (seconds to connect),
    ``priority`` (of all that is asked for: a number, lower goes first, or a class such as "batch");
    of the others ``timeout`` (seconds for each read), ``max_retries``.
    Raises `BackendError` where nothing answers, `BadInputError` for another kind of URL.
    """
    parts = urlsplit(url)
    if parts.scheme in ("http", "https"):
        return _over_http(url.rstrip("/"), api_key, options)
    if parts.scheme in ("tcp", "ipc"):
        from .remote import RemoteBackend

        if parts.scheme == "tcp" and parts.port is None:
            url = f"{url.rstrip('/')}:{ZMQ_PORT}"
        return RemoteBackend(url, api_key, **options)
    raise BadInputError(
        f"{url!r} is no endpoint: tcp://host:port, ipc://path or http://host:port", param="url"
    )


def _over_http(url: str, api_key: str | None, options: dict[str, Any]) -> Backend:
    from .http_programs import HttpBackend, ask_info
    from .openai import OpenAI

    if url.endswith("/v1"):
        return OpenAI(None, url, api_key, **options)
    info = ask_info(url, api_key) if "is_chat_model" not in options else None
    if info is None:
        return OpenAI(None, url + "/v1", api_key, **options)
    return HttpBackend(url, api_key, info=info, **options)
