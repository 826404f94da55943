"""What the endpoints share: what runs behind them once it does, and the requests under way."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from ...keys import Keys
from .. import origin
from ..executor import EngineExecutor
from ..service import Service
from .errors import RETRY_AFTER, HttpError, bad, cut
from .metrics import Metrics
from .responses.store import ResponseStore

SILENT_S = 20.0
"""A loop of the engine that said nothing for so long is not healthy."""
_FIRST_PROGRAM = 1 << 40
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on what clients may ask of the server."""

    body_bytes: int = 16 << 20
    header_bytes: int = 64 << 10
    headers: int = 200
    requests: int = 4096
    programs: int = 1024
    responses: int = 1000
    response_bytes: int = 64 << 20
    """Of all the responses that are remembered, together."""
    samples: int = 4096
    """Of one request: prompts times ``n``."""


@dataclass(frozen=True, slots=True)
class Live:
    """What runs behind the endpoints. ``defaults`` are the model's own sampling parameters."""

    service: Service
    model_path: str
    tokenizer_path: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    trust_template: bool = False
    """Whether a request may bring a chat template of its own."""

    @property
    def executor(self) -> EngineExecutor:
        return self.service.executor

    @property
    def model(self) -> str:
        return self.service.model


class Running(Protocol):
    """What a request has set going, by its id."""

    rid: str

    def abort(self) -> None: ...


class HttpState:
    """Lives as long as the server; ``live`` is ``None`` while the model loads.

    Each of ``admin_key`` and ``metrics_key``, where given, is what its endpoints ask for."""

    def __init__(
        self,
        limits: HttpLimits | None = None,
        api_key: str | Iterable[str] | None = None,
        *,
        admin_key: str | None = None,
        metrics_key: str | None = None,
        vllm_names: bool = True,
    ) -> None:
        self.limits = limits or HttpLimits()
        self.keys = Keys(api_key)
        self.admin_key = Keys(admin_key)
        self.metrics_key = Keys(metrics_key)
        self.live: Live | None = None
        self.draining = False
        self.created = int(time.time())
        self.metrics = Metrics(vllm_names)
        self.runs: dict[str, Running] = {}
        """By id, after the id of the key where there is one: two keys may use the same ids."""
        self._entered: dict[int, str] = {}
        self.responses = ResponseStore(self.limits.responses, self.limits.response_bytes)
        self.numbers = itertools.count(_FIRST_PROGRAM)
        self._background: set[asyncio.Task[None]] = set()

    def attach(self, live: Live) -> None:
        """The model is loaded: take requests."""
        self.live = live
        self.metrics.model = live.model
        live.executor.engine.observer = self.metrics

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what no request waits for."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def now(self) -> int:
        """Seconds since 1970, as ``created`` says them."""
        return int(time.time())

    def health(self) -> str | None:
        """What is wrong, or ``None``."""
        if self.live is None:
            return "the model is loading"
        engine = self.live.executor.engine
        if engine.gone is not None:
            return engine.gone
        if engine.silent_s > SILENT_S:
            return f"the engine has said nothing for {engine.silent_s:.0f} s"
        return None

    def need(self) -> Live:
        """Raises `HttpError` (503) when nothing can be served now."""
        if self.live is None:
            raise HttpError(503, "the model is loading", headers=RETRY_AFTER)
        if self.draining:
            raise HttpError(503, "the server is shutting down", headers=RETRY_AFTER)
        gone = self.live.executor.engine.gone
        if gone is not None:
            raise HttpError(503, gone, headers=RETRY_AFTER)
        return self.live

    def need_model(self, name: str | None) -> Live:
        """The same, and 404 for a model that is not the served one."""
        live = self.need()
        if name and name != live.model:
            raise HttpError(404, f"The model `{cut(name)}` does not exist.", param="model")
        return live

    def enter(self, run: Running) -> None:
        """Raises `HttpError`: 429 when too much runs, 400 for an id that is in use."""
        if len(self.runs) >= self.limits.requests:
            self.metrics.rejected()
            raise HttpError(429, "too many requests at a time", headers=RETRY_AFTER)
        key = _scoped(run.rid)
        if key in self.runs:
            raise bad(f"request {cut(run.rid)!r} is running already", "rid")
        self.runs[key] = run
        self._entered[id(run)] = key

    def leave(self, run: Running) -> None:
        key = self._entered.pop(id(run), None)
        if key is not None:
            del self.runs[key]

    def find(self, rid: str) -> Running | None:
        """What runs under this id and is the caller's own."""
        return self.runs.get(_scoped(rid))

    def mine(self) -> list[Running]:
        """All that runs and is the caller's own."""
        prefix = _scoped("")
        return [run for key, run in self.runs.items() if key.startswith(prefix)]


def _scoped(rid: str) -> str:
    owner = origin.current().owner
    return f"{owner.hex()}/{rid}" if owner else rid


def defaults_of(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters that a model's generation_config.json sets."""
    found = {
        name: value
        for name in _DEFAULTS
        if isinstance(value := generation_config.get(name), (int, float))
        and not isinstance(value, bool)
    }
    if generation_config.get("do_sample") is False:
        for name in ("temperature", "top_p", "top_k", "min_p"):
            found.pop(name, None)
    return found
