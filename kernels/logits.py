"""What changes logits before a token is taken: penalties and grammar masks. Reference:
`reference.sampling`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import after_previous, ceil_div, require, start

BLOCK = 2048


@triton.jit
def penalize_kernel(
    logits,
    index,
    counts,
    repetition,
    frequency,
    presence,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    PROMPT_BIT: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    after_previous(PDL)
    which = tl.load(index + row).to(tl.int64)
    if which >= 0:
        there = token < VOCABULARY
        seen = tl.load(counts + which * VOCABULARY + token, mask=there, other=0)
        place = logits + row * VOCABULARY + token
        # Most tokens were never seen: leave them where they are.
        touched = there & (seen != 0)
        x = tl.load(place, mask=touched, other=0.0)
        by = tl.load(repetition + row)
        x = tl.where(x > 0, x / by, x * by)
        times = (seen & (PROMPT_BIT - 1)).to(tl.float32)
        x -= times * tl.load(frequency + row)
        x -= tl.where(times > 0, tl.load(presence + row), 0.0)
        tl.store(place, x, mask=touched)


@triton.jit(do_not_specialize_on_alignment=["at", "of"])
def mask_kernel(
    logits,
    mask,
    at,
    of,
    words,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    AT: tl.constexpr,
    OF: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    after_previous(PDL)
    there = token < VOCABULARY
    line = tl.load(of + row).to(tl.int64) if OF else row
    word = tl.load(mask + line * words + token // 32, mask=there, other=-1)
    forbidden = ((word >> (token % 32)) & 1) == 0
    if AT:
        row = tl.load(at + row).to(tl.int64)
    place = logits + row * VOCABULARY + token
    tl.store(place, float("-inf"), mask=there & forbidden)


def check_logits(logits: torch.Tensor) -> tuple[int, int]:
    """(rows, vocabulary) of float32 logits [S, V]. Raises ValueError for anything else."""
    require(
        logits.dim() == 2 and logits.is_contiguous() and logits.dtype == torch.float32,
        f"logits must be [S, V] float32, contiguous: {tuple(logits.shape)} {logits.dtype}",
    )
    return logits.shape[0], logits.shape[1]


def penalize_(
    logits: torch.Tensor,
    index: torch.Tensor,
    counts: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    *,
    prompt_bit: int,
    pdl: bool = False,
) -> torch.Tensor:
    """Apply penalties in place to logits [S, V] float32; returns them.

    counts [P, V] int32: how often a token was sampled, plus `prompt_bit` when the prompt has it;
    row i uses counts[index[i]], none where index [S] is negative. repetition, frequency, presence
    [S] float32. Raises ValueError for logits of another form or counts of another width.
    """
    rows, vocabulary = check_logits(logits)
    require(
        counts.shape[1] == vocabulary and counts.is_contiguous(),
        f"counts must be [P, {vocabulary}], contiguous",
    )
    if rows:
        start(
            penalize_kernel,
            (rows, ceil_div(vocabulary, BLOCK)),
            logits,
            index,
            counts,
            repetition,
            frequency,
            presence,
            VOCABULARY=vocabulary,
            BLOCK=BLOCK,
            PROMPT_BIT=prompt_bit,
            device=logits.device,
            pdl=pdl,
        )
    return logits


def mask_(
    logits: torch.Tensor,
    mask: torch.Tensor,
    at: torch.Tensor | None = None,
    of: torch.Tensor | None = None,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """Set logits [S, V] to -inf in place where mask [K, ceil(V / 32)] int32 has a 0: bit v % 32 of
    word v // 32. Row of[i] of the mask is for logits row at[i] ([M] int32 both); i is without.

    Raises ValueError for shapes that do not fit.
    """
    rows, vocabulary = check_logits(logits)
    words = ceil_div(vocabulary, 32)
    if at is not None:
        require(at.dim() == 1 and at.dtype == torch.int32, "at must be [M] int32")
        rows = len(at)
    lines = rows
    if of is not None:
        require(of.shape == (rows,) and of.dtype == torch.int32, f"of must be [{rows}] int32")
        lines = len(mask)
    require(
        mask.shape == (lines, words) and mask.dtype == torch.int32 and mask.is_contiguous(),
        f"mask must be [{lines}, {words}] int32, contiguous",
    )
    if rows:
        start(
            mask_kernel,
            (rows, ceil_div(vocabulary, BLOCK)),
            logits,
            mask,
            mask if at is None else at,
            mask if of is None else of,
            words,
            VOCABULARY=vocabulary,
            BLOCK=BLOCK,
            AT=at is not None,
            OF=of is not None,
            device=logits.device,
            pdl=pdl,
        )
    return logits


def cost(rows: int, vocabulary: int) -> tuple[int, int]:
    """(bytes moved, operations) of one mask over [rows, vocabulary] logits; penalties read counts
    instead of words."""
    return rows * vocabulary * 4 + rows * vocabulary // 8, rows * vocabulary
