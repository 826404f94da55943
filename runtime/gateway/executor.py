"""Where programs' streams begin: one engine, one model's tokenizer and chat template."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import random

from ..protocol.messages import EngineSampling
from ..protocol.sampling import SamplingParams
from . import origin
from .context import EngineContext
from .engine_client import EngineClient
from .engine_sampling import resolve
from .healing import Healer
from .tokenizer import Tokenizer


class EngineExecutor:
    """Opens contexts over one engine and one model's tokenizer and chat template.

    ``draws`` gives seeds to generations that come without one; ``secret`` keys namespaces, so that
    with the same one they are the same.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        context_length: int,
        draws: random.Random | None = None,
        secret: bytes | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.context_length = context_length
        self._draws = draws or random.Random()
        self._secret = secret or os.urandom(32)
        self._healer: Healer | None = None

    @property
    def room(self) -> int:
        """Tokens that one request may have: what the context holds, and the engine's KV memory."""
        slots = self.engine.info.get("num_slots")
        return min(self.context_length, slots) if slots else self.context_length

    def open(self, program: int, cache_salt: str | None = None) -> EngineContext:
        return EngineContext(self, program, self.namespace(cache_salt))

    def namespace(self, cache_salt: str | None) -> bytes:
        """The radix tree's namespace: of its own for each API key, and within it for each salt, so
        that nobody hits (or times hits of) what another key or salt cached."""
        owner = origin.current().owner
        if not owner and cache_salt is None:
            return b""
        salt = b"" if cache_salt is None else b"\1" + cache_salt.encode("utf-8", "replace")
        named = bytes([len(owner)]) + owner + salt
        return hmac.new(self._secret, named, hashlib.sha256).digest()

    async def healer(self) -> Healer:
        """What takes the ends of prompts back; made when it is first needed, in a thread."""
        if self._healer is None:
            self._healer = await asyncio.to_thread(Healer, self.tokenizer)
        return self._healer

    def resolve(self, params: SamplingParams, prompt_tokens: int) -> EngineSampling:
        seed = self._draws.getrandbits(31) if params.seed is None else params.seed
        return resolve(params, seed, prompt_tokens, self.context_length, self.tokenizer)
