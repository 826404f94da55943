"""What a decode step begins and ends with."""

from __future__ import annotations

import torch

from .sampling import greedy


def enter_decode(
    rows: torch.Tensor,
    kv_lens: torch.Tensor,
    slots: torch.Tensor,
    last_tokens: torch.Tensor,
    table: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `Ops.enter_decode`."""
    positions = kv_lens - 1
    table[rows.long(), positions.long()] = slots
    return last_tokens[rows.long()], positions, slots.long()


def take_greedy(
    logits: torch.Tensor, rows: torch.Tensor, last_tokens: torch.Tensor
) -> torch.Tensor:
    """See `Ops.take_greedy`."""
    ids, bad = greedy(logits)
    last_tokens[rows.long()] = ids
    return torch.stack((ids, bad.to(torch.int32)))
