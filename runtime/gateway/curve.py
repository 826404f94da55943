"""The server's CURVE keys: two files in a folder, made on first use."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import zmq

from ..protocol.errors import BadInputError

PUBLIC_NAME = "server.public"
SECRET_NAME = "server.secret"


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """Z85 text, 40 bytes each."""

    public: bytes
    secret: bytes


def server_keys(folder: Path) -> CurveKeys:
    """Read the keys of a folder, or make them: the secret one readable by this user only. Clients
    need the public one. Raises `BadInputError` where that does not work."""
    secret_path, public_path = folder / SECRET_NAME, folder / PUBLIC_NAME
    try:
        if not secret_path.exists():
            public, secret = zmq.curve_keypair()
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(secret_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(secret)
            public_path.write_bytes(public)
        secret = secret_path.read_bytes().strip()
        public = zmq.curve_public(secret)
    except (OSError, ValueError, zmq.ZMQError) as error:
        raise BadInputError(f"CURVE keys in {folder}: {error}", param="curve") from None
    return CurveKeys(public, secret)
