"""Bytes to validated messages and back. Nothing here executes what it reads."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from .errors import BackendError, BadInputError
from .messages import ClientMessage, EngineMessage, EngineReply, GatewayMessage

MAX_MESSAGE_BYTES = 256 << 20

M = TypeVar("M")
_encoder = msgspec.msgpack.Encoder()


class Codec(Generic[M]):
    """Encodes anything, decodes only the messages of one direction."""

    def __init__(self, union: Any, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(union)
        self.max_bytes = max_bytes

    def encode(self, message: M) -> bytes:
        """Raises `BadInputError` for what no message can carry."""
        return _encoded(message)

    def decode(self, data: bytes | memoryview) -> M:
        """Raises `BackendError` saying what was wrong: size, msgpack, tag, a field's type."""
        if len(data) > self.max_bytes:
            raise BackendError(f"message of {len(data)} bytes; the limit is {self.max_bytes}")
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, ValueError) as error:
            raise BackendError(f"malformed message: {str(error)[:200]}") from None


client_codec: Codec[ClientMessage] = Codec(ClientMessage)
gateway_codec: Codec[GatewayMessage] = Codec(GatewayMessage)
engine_codec: Codec[EngineMessage] = Codec(EngineMessage)
reply_codec: Codec[EngineReply] = Codec(EngineReply)


def raw(value: Any) -> msgspec.Raw:
    """Plain data inside a message: encoded now, decoded by whoever knows its type. Raises
    `BadInputError` for what no message can carry."""
    return msgspec.Raw(_encoded(value))


def half_character(error: UnicodeEncodeError) -> BadInputError:
    """What is wrong with text that cannot be encoded."""
    half = error.object[error.start : error.end]
    return BadInputError(f"text holds half a character, {half!r}, which is no Unicode")


def _encoded(value: Any) -> bytes:
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError as error:
        raise half_character(error) from None
    except (OverflowError, TypeError, ValueError, RecursionError) as error:
        raise BadInputError(f"a value cannot be sent: {error}") from None
