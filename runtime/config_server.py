"""Settings that only a runtime with clients on other sockets needs. Torch-free."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta


def says(help_text: str, **bounds: Any) -> Meta:
    return Meta(description=help_text, **bounds)


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where it listens, who is let in, and what becomes of running work at the end."""

    host: Annotated[
        str, says("Interface to listen on; any but loopback needs an API key.", min_length=1)
    ] = "127.0.0.1"
    port: Annotated[int, says("TCP port of the HTTP endpoints.", ge=0, le=65535)] = 8000
    zmq_port: (
        Annotated[
            int,
            says(
                "TCP port of the ZMQ endpoint. None: 7411, or any if it is taken.", ge=0, le=65535
            ),
        ]
        | None
    ) = None
    api_key: (
        Annotated[
            str,
            says("Key that clients must send; several are separated by commas.", min_length=1),
        ]
        | None
    ) = None
    api_key_file: (
        Annotated[str, says("File of more keys, one a line; a line with # is a comment.")] | None
    ) = None
    admin_key: (
        Annotated[
            str,
            says("Key of its own for what operators ask, such as /flush_cache.", min_length=1),
        ]
        | None
    ) = None
    metrics_key: (
        Annotated[str, says("Key of its own for /metrics, which is open otherwise.", min_length=1)]
        | None
    ) = None
    no_auth: Annotated[
        bool, says("Listen on any interface without a key: whoever reaches it may use it.")
    ] = False
    cors_origin: (
        Annotated[
            str,
            says(
                "Origins whose pages may call the HTTP endpoints, separated by commas; * is all. "
                "None: none may.",
                min_length=1,
            ),
        ]
        | None
    ) = None
    ssl_certfile: (
        Annotated[str, says("Certificate chain (PEM) to serve HTTPS with.", min_length=1)] | None
    ) = None
    ssl_keyfile: (
        Annotated[
            str,
            says("Private key (PEM), if it is not in the certificate's file.", min_length=1),
        ]
        | None
    ) = None
    max_body_bytes: Annotated[int, says("Largest body of an HTTP request.", ge=1024)] = 16 << 20
    max_choices: Annotated[
        int, says("Answers of one HTTP request at most: prompts times n.", ge=1)
    ] = 4096
    drain_seconds: Annotated[
        float, says("What running work gets when the server is told to stop.", ge=0.0)
    ] = 25.0
    restart_engine: Annotated[
        bool, says("Start a dead engine again, and with it what had streamed nothing.")
    ] = False
    disable_vllm_metrics: Annotated[
        bool, says("Show metrics under ramet's names only, not also under vLLM's.")
    ] = False
    curve: (
        Annotated[
            str,
            says(
                "Folder of the server's CURVE keys, made on first use: encrypts the TCP endpoint."
            ),
        ]
        | None
    ) = None
