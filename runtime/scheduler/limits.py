"""What a scheduler may hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .classes import CLASSES, PriorityClass

MOST_WAITING, MOST_WAITING_TOKENS = 1 << 17, 1 << 27
"""What waits where nobody has said how much may: so much that only memory is protected."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step, and the whole engine, may hold."""

    max_rows: int = 64
    context_length: int = 8192
    step_tokens: int = 512
    """Prefill tokens a step, beside the decodes."""
    prompt_sizes: tuple[int, ...] = ()
    """Sizes, in tokens, of steps without decodes that the runner has captured, ascending. Where
    there are any, such steps take turns with decodes instead of sharing steps with them."""
    max_waiting: int = MOST_WAITING
    max_waiting_tokens: int = MOST_WAITING_TOKENS
    """Prompt tokens of all that wait."""
    classes: Mapping[str, PriorityClass] = field(default_factory=lambda: CLASSES)
    priority_ageing: float = 10.0
    """Seconds of waiting that are worth one step of priority."""
    ageing: float = 5.0
    """Seconds after which a waiting request goes before those that a policy prefers."""
