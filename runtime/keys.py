"""API keys: who a client is, as far as anybody needs to know."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from pathlib import Path

from .protocol.errors import BadInputError

_KEY = re.compile(r"[!-+\--~]{1,512}")  # visible ASCII: what a header carries; no comma


class Keys:
    """A set of keys, none of which can be guessed byte by byte: all are compared, each in constant
    time and by its digest."""

    def __init__(self, keys: str | Iterable[str] | None = None) -> None:
        given = [keys] if isinstance(keys, str) else keys or ()
        self._digests = [hashlib.sha256(key.encode()).digest() for key in dict.fromkeys(given)]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def owner(self, given: bytes) -> bytes | None:
        """The id of the key that this is; ``None`` for a wrong one. Ids tell nothing of keys."""
        digest = hashlib.sha256(given).digest()
        found = None
        for known in self._digests:
            if hmac.compare_digest(digest, known):
                found = hashlib.sha256(b"owner" + known).digest()
        return found


def check_keys(keys: Iterable[str], where: str) -> tuple[str, ...]:
    """The keys, or `BadInputError` for one that no client could send; it is not repeated."""
    checked = tuple(keys)
    for number, key in enumerate(checked, 1):
        if not _KEY.fullmatch(key):
            raise BadInputError(
                f"{where}: key {number} must be 1 to 512 visible ASCII characters, no comma",
                param=where,
            )
    return checked


def read_keys(path: str) -> tuple[str, ...]:
    """Keys of a file, one a line; empty lines and those that begin with # are passed over. Raises
    `BadInputError`."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(
            f"cannot read the keys in {path}: {error}", param="api_key_file"
        ) from None
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise BadInputError(f"{path} holds no key", param="api_key_file")
    return check_keys(keys, "api_key_file")
