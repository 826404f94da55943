"""Where programs' streams begin: one engine, one model's tokenizer and chat template."""

from __future__ import annotations

import hashlib
import hmac
import os
import random

from ..protocol.messages import EngineSampling
from ..protocol.sampling import SamplingParams
from .context import EngineContext
from .engine_client import EngineClient
from .engine_sampling import resolve
from .tokenizer import Tokenizer


class EngineExecutor:
    """Opens contexts over one engine and one model's tokenizer and chat template.

    ``draws`` gives seeds to generations that come without one.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        context_length: int,
        draws: random.Random | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.context_length = context_length
        self._draws = draws or random.Random()
        self._secret = os.urandom(32)

    def open(self, program: int, cache_salt: str | None = None) -> EngineContext:
        return EngineContext(self, program, self.namespace(cache_salt))

    def namespace(self, cache_salt: str | None) -> bytes:
        """The radix tree's namespace: of its own for each salt, which only its knower can hit."""
        if cache_salt is None:
            return b""
        return hmac.new(
            self._secret, cache_salt.encode("utf-8", "replace"), hashlib.sha256
        ).digest()

    def resolve(self, params: SamplingParams, prompt_tokens: int) -> EngineSampling:
        seed = self._draws.getrandbits(31) if params.seed is None else params.seed
        return resolve(params, seed, prompt_tokens, self.context_length, self.tokenizer)
