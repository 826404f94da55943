"""A chat template that came with a request, rendered apart from the server and with a deadline."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from .errors import bad

DEADLINE_S = 5.0
MOST_SOURCE = 256 << 10
AT_ONCE = 2
_KEPT = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "LANG")
"""What the process gets of the environment, in which there may be keys."""


async def render_apart(source: str, named_tokens: Mapping[str, str], variables: Any) -> str:
    """Raises `HttpError` (400) when it is not valid, fails, or takes too long."""
    if len(source) > MOST_SOURCE:
        raise bad(f"chat_template: at most {MOST_SOURCE} characters", "chat_template")
    asked = msgspec.json.encode(
        {"source": source, "named_tokens": named_tokens, "variables": variables}
    )
    async with _slots(asyncio.get_running_loop()):
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            f"{__package__}.render_child",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={name: os.environ[name] for name in _KEPT if name in os.environ},
        )
        try:
            async with asyncio.timeout(DEADLINE_S):
                data, _ = await child.communicate(asked)
        except TimeoutError:
            raise bad("chat_template: it takes too long", "chat_template") from None
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
    if child.returncode != 0:
        raise bad("chat_template: it takes too much time or memory", "chat_template")
    answer: dict[str, str] = msgspec.json.decode(data)
    if "error" in answer:
        raise bad(f"chat_template: {answer['error']}", "chat_template")
    return answer["text"]


@lru_cache(maxsize=1)
def _slots(_: asyncio.AbstractEventLoop) -> asyncio.Semaphore:
    """So many run at the same time; others wait."""
    return asyncio.Semaphore(AT_ONCE)
