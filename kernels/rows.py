"""Over the rows of logits: the largest, the log-sum-exp. Reference: `reference.sampling`.

A row is cut into chunks of a fixed size, so that its sums never depend on what else is in the
batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import after_previous, ceil_div, power_of_two, require, start

CHUNK = 8192


@triton.jit
def chunk_kernel(
    logits,
    temperature,
    best,
    arg,
    sums,
    VOCABULARY: tl.constexpr,
    CHUNK: tl.constexpr,
    HOT: tl.constexpr,
    SUM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of one chunk of a row: the largest logit (NaN if one is), its id, and the sum of exp((x -
    largest) / T)."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    after_previous(PDL)
    x = tl.load(logits + row * VOCABULARY + token, mask=token < VOCABULARY, other=float("-inf"))
    x = x.to(tl.float32)
    broken = tl.max((x != x).to(tl.int32), axis=0) > 0
    x = tl.where(x != x, float("-inf"), x)
    largest, where = tl.max(x, axis=0, return_indices=True, return_indices_tie_break_left=True)
    place = row * tl.num_programs(1) + chunk
    tl.store(best + place, tl.where(broken, float("nan"), largest))
    tl.store(arg + place, chunk * CHUNK + where)
    if SUM:
        scale = 1.0
        if HOT:
            scale = 1.0 / tl.maximum(tl.load(temperature + row), 1e-5)
        weight = tl.where(x == largest, 1.0, tl.exp((x - largest) * scale))
        tl.store(sums + place, tl.sum(tl.where(x > float("-inf"), weight, 0.0), axis=0))


@triton.jit
def gather_chunks(best, arg, row, chunks, CHUNKS: tl.constexpr):
    """(largest of each chunk with NaN as -inf, largest of all, its id or 0, whether the row is
    bad)."""
    c = tl.arange(0, CHUNKS)
    place = row * chunks + c
    each = tl.load(best + place, mask=c < chunks, other=float("-inf"))
    broken = tl.max((each != each).to(tl.int32), axis=0) > 0
    each = tl.where(each != each, float("-inf"), each)
    largest, where = tl.max(each, axis=0, return_indices=True, return_indices_tie_break_left=True)
    bad = broken | (largest == float("-inf"))
    token = tl.load(arg + row * chunks + where)
    return each, largest, tl.where(bad, 0, token), bad


@triton.jit(do_not_specialize_on_alignment=["ids", "bad_out", "rows"])
def greedy_kernel(
    best, arg, ids, bad_out, rows, last_tokens, chunks, CHUNKS: tl.constexpr, NOTED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    after_previous(PDL)
    _each, _largest, token, bad = gather_chunks(best, arg, row, chunks, CHUNKS)  # pyright: ignore
    tl.store(ids + row, token)
    tl.store(bad_out + row, bad)
    if NOTED:
        tl.store(last_tokens + tl.load(rows + row), token)


@triton.jit
def lse_kernel(
    best,
    sums,
    logits,
    ids,
    out,
    chunks,
    VOCABULARY: tl.constexpr,
    CHUNKS: tl.constexpr,
    PICK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row's log-sum-exp, or with PICK the log-prob of its id."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNKS)
    after_previous(PDL)
    each = tl.load(best + row * chunks + c, mask=c < chunks, other=float("-inf"))
    total = tl.load(sums + row * chunks + c, mask=c < chunks, other=0.0)
    broken = tl.max((each != each).to(tl.int32), axis=0) > 0
    largest = tl.max(tl.where(each != each, float("-inf"), each), axis=0)
    weight = tl.where(each == float("-inf"), 0.0, tl.exp(each - largest))
    lse = largest + tl.log(tl.sum(total * weight, axis=0))
    lse = tl.where(broken, float("nan"), lse)
    if PICK:
        token = tl.load(ids + row).to(tl.int64)
        known = (token >= 0) & (token < VOCABULARY)
        x = tl.load(logits + row * VOCABULARY + token, mask=known, other=float("nan"))
        lse = x.to(tl.float32) - lse
    tl.store(out + row, lse)


def scan(
    logits: torch.Tensor,
    temperature: torch.Tensor | None = None,
    *,
    sums: bool = True,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each chunk of logits [S, V]: largest [S, C] float32 (NaN where one is), its id [S, C]
    int32, and the sum of exp((x - largest) / temperature [S]) [S, C] float32 where `sums`. Raises
    ValueError for logits not contiguous.
    """
    require(logits.dim() == 2 and logits.is_contiguous(), "logits must be [S, V], contiguous")
    rows, vocabulary = logits.shape
    chunks = ceil_div(vocabulary, CHUNK)
    best = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    arg = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    total = torch.empty_like(best)
    if rows:
        start(
            chunk_kernel,
            (rows, chunks),
            logits,
            best if temperature is None else temperature,
            best,
            arg,
            total,
            VOCABULARY=vocabulary,
            CHUNK=CHUNK,
            HOT=temperature is not None,
            SUM=sums,
            device=logits.device,
            pdl=pdl,
            warps=8,
        )
    return best, arg, total


def greedy(logits: torch.Tensor, *, pdl: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [S] int32 of the largest of logits [S, V], the first of equals; bad [S] bool: a NaN, or
    nothing above -inf (the id is then 0). Raises ValueError for logits not contiguous.
    """
    ids = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    bad = torch.empty(len(logits), dtype=torch.bool, device=logits.device)
    _greedy(logits, ids, bad, None, pdl)
    return ids, bad


def take_greedy(
    logits: torch.Tensor, rows: torch.Tensor, last_tokens: torch.Tensor, *, pdl: bool = False
) -> torch.Tensor:
    """`greedy` of logits [S, V] as one tensor [2, S] int32: ids, and 1 where bad; last_tokens at
    rows [S] int32 takes the ids (of rows that are the same, any one's)."""
    both = torch.empty(2, len(logits), dtype=torch.int32, device=logits.device)
    _greedy(logits, both[0], both[1], (rows, last_tokens), pdl)
    return both


def _greedy(
    logits: torch.Tensor,
    ids: torch.Tensor,
    bad: torch.Tensor,
    noted: tuple[torch.Tensor, torch.Tensor] | None,
    pdl: bool,
) -> None:
    best, arg, _ = scan(logits, sums=False, pdl=pdl)
    count, chunks = best.shape
    if count:
        start(
            greedy_kernel, (count,), best, arg, ids, bad, *(noted or (ids, ids)), chunks,
            CHUNKS=power_of_two(chunks), NOTED=noted is not None, device=logits.device, pdl=pdl,
            warps=1,
        )  # fmt: skip


def _lse(logits: torch.Tensor, ids: torch.Tensor | None, pdl: bool) -> torch.Tensor:
    best, _, sums = scan(logits, pdl=pdl)
    rows, chunks = best.shape
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        start(
            lse_kernel, (rows,), best, sums, logits, logits if ids is None else ids, out, chunks,
            VOCABULARY=logits.shape[1], CHUNKS=power_of_two(chunks), PICK=ids is not None,
            device=logits.device, pdl=pdl, warps=1,
        )  # fmt: skip
    return out


def log_sum_exp(logits: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """Natural log-sum-exp of each row of logits [S, V]: [S] float32; NaN where the row has one."""
    return _lse(logits, None, pdl)


def token_logprobs(logits: torch.Tensor, ids: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """Natural log-prob of ids [S] under each row of logits [S, V]: [S] float32; NaN for ids
    outside."""
    return _lse(logits, ids, pdl)


def top_logprobs(
    logits: torch.Tensor, k: int, *, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k most likely ids of each row, [S, k] int32, and their log-probs, [S, k] float32, largest
    first."""
    values, ids = logits.topk(min(k, logits.shape[1]), dim=-1)
    return ids.to(torch.int32), values.float() - log_sum_exp(logits, pdl=pdl).unsqueeze(1)


def cost(rows: int, vocabulary: int, size: int) -> tuple[int, int]:
    """(bytes moved, operations) of one pass over [rows, vocabulary] logits of `size` bytes."""
    return rows * vocabulary * size, rows * vocabulary * 4
