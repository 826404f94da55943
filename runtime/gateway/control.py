"""What a client may ask of the server that is not a generation."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from ..protocol.errors import BackendError, RametError
from ..protocol.messages import Control
from .engine_client import EngineClient
from .explanation import between, explain
from .generate import prompt_ids

if TYPE_CHECKING:
    from .service import Service

FLUSH_WAIT_S = 10.0


async def flush_cache(engine: EngineClient, wait_s: float = FLUSH_WAIT_S) -> dict[str, Any]:
    """Forget every cached prefix. Waits for running work to end, ``wait_s`` seconds at most, then
    raises the engine's refusal."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return await engine.ask("flush")
        except BackendError:
            raise
        except RametError:
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(0.02)


async def server_info(service: Service) -> dict[str, Any]:
    """What runs here and how full it is."""
    engine = service.executor.engine
    return {
        **engine.info,
        "model": service.model,
        "version": service.version,
        "context_length": service.executor.context_length,
        "page_size": 1,
        "programs": service.programs,
        "clients": service.clients,
        **await engine.ask("info"),
    }


async def explain_prompt(service: Service, asked: Control) -> dict[str, Any]:
    """Where a prompt leaves the caller's cache, or another prompt. Raises `BadInputError`."""
    executor = service.executor
    ids = prompt_ids(executor, asked.prompt, None)
    if asked.other is not None:
        return between(executor, ids, prompt_ids(executor, asked.other, None))
    return await explain(executor, ids, asked.cache_salt)
