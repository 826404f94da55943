"""Into how many parts the KV of one step is cut, from what the host knows alone."""

from __future__ import annotations

from ..launch import ceil_div

MOST_SPLITS = 64
SHORTEST = 64
"""Tokens under which a part is not worth a program of its own."""


def choose_splits(work: int, max_kv: int, programs: int, shortest: int = SHORTEST) -> int:
    """Parts for `work` independent (item, head block) pairs on a device that runs `programs` at
    once.

    The smallest number whose last wave wastes at most a tenth more than the best does. Items
    shorter than `max_kv` use fewer parts: each cuts its own length on the device, into parts of at
    least `shortest`.
    """
    most = max(1, min(MOST_SPLITS, ceil_div(max_kv, shortest)))
    if work == 0:
        return 1

    def used(parts: int) -> float:
        return work * parts / (ceil_div(work * parts, programs) * programs)

    best = max(used(parts) for parts in range(1, most + 1))
    return next(parts for parts in range(1, most + 1) if used(parts) >= 0.9 * best)


def fixed_splits(max_kv: int, split_tokens: int) -> int:
    """Parts of a fixed length, so that where an item is cut does not depend on its neighbours."""
    return max(1, ceil_div(max_kv, split_tokens))
