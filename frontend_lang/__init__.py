"""ramet: a language for prompt programs, and the runtime that runs them.

import ramet as rt

@rt.function
def tips(s, topic):
    s += rt.user(f"Give a tip about {topic}.")
    s += rt.assistant(rt.gen("tip", max_tokens=48))

with rt.Runtime("smollm2-135m-instruct") as runtime:
    print(tips.run("sleep", backend=runtime)["tip"])
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ramet.runtime.protocol import (
    AbortedError,
    BackendError,
    BadInputError,
    ContextLengthError,
    GrammarError,
    MissingValueError,
    ModelError,
    ProgramError,
    RametError,
)

from .backends.base import Backend, default_backend, set_default_backend
from .choices import (
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from .conditions import matches
from .expressions import gen, gen_int, gen_string, select
from .forks import Forks
from .function import Function, function
from .roles import (
    assistant,
    assistant_begin,
    assistant_end,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
)
from .state import State

if TYPE_CHECKING:
    from . import testing
    from .backends.embedded import Runtime
    from .backends.endpoint import RuntimeEndpoint
    from .backends.openai import OpenAI

__version__ = "0.1.0"

_LAZY = {
    "Runtime": "backends.embedded",
    "RuntimeEndpoint": "backends.endpoint",
    "OpenAI": "backends.openai",
    "testing": "testing",
}

__all__ = [
    "AbortedError",
    "Backend",
    "BackendError",
    "BadInputError",
    "ContextLengthError",
    "Forks",
    "Function",
    "GrammarError",
    "MissingValueError",
    "ModelError",
    "OpenAI",
    "ProgramError",
    "RametError",
    "Runtime",
    "RuntimeEndpoint",
    "State",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "greedy_token_selection",
    "matches",
    "select",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "testing",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
]


def flush_cache(backend: Backend | None = None) -> None:
    """Have the backend (or the default one) forget every cached prefix."""
    default_backend(backend).flush_cache()


def get_server_info(backend: Backend | None = None) -> dict[str, Any]:
    """What runs behind the backend (or the default one), and how full it is."""
    return default_backend(backend).server_info()


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'ramet' has no attribute {name!r}")
    module = import_module(f".{_LAZY[name]}", __name__)
    value = module if name == "testing" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
