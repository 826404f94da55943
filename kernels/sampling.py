"""A draw for every row at once, with top-k, top-p and min-p, without a sort. Reference:
`reference.sampling.sample`.

Weights are exp((logit - largest) / T), so the largest is 1 and filters need no normalizing sum.
Filters keep what reaches a threshold. It is searched for among few candidates: counts and masses
above a ladder of weights (`ladder_kernel`) show how low the threshold can lie, what lies above that
is packed in order of ids (`pack_kernel`), and one program a row finds the threshold and draws
(`draw_kernel`). A row too flat to be packed is searched whole, slowly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .draw import edge_by_count, edge_by_mass, pick, uniform_of, weight_of
from .launch import after_previous, power_of_two, require, start
from .logits import check_logits
from .rows import CHUNK, gather_chunks, scan

RUNGS = 8
"""Rungs of the ladder; rung j is the weight exp2(-(j + 1)(j + 4) / 4): from 0.5 down to 5e-8."""
CANDIDATES = 4096
GREEDY_BELOW = tl.constexpr(1e-5)


@triton.jit
def rung(j):
    level = tl.cast(j, tl.float32)
    return tl.exp2(-(level + 1.0) * (level + 4.0) / 4.0)


@triton.jit
def filters_of(row, temperature, top_k, top_p, min_p, VOCABULARY: tl.constexpr):
    """(1 / T, k or 0 for all, p, min p, whether the row draws, whether it filters)."""
    heat = tl.load(temperature + row)
    k = tl.load(top_k + row).to(tl.int32)
    k = tl.where((k <= 0) | (k >= VOCABULARY), 0, k)
    p = tl.load(top_p + row)
    least = tl.load(min_p + row)
    draws = heat >= GREEDY_BELOW
    filters = draws & ((k > 0) | (p < 1.0) | (least > 0.0))
    return 1.0 / tl.maximum(heat, GREEDY_BELOW), k, p, least, draws, filters


@triton.jit
def load_chunk(logits, row, chunk, VOCABULARY: tl.constexpr, CHUNK: tl.constexpr):
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    place = logits + row * VOCABULARY + token
    return tl.load(place, mask=token < VOCABULARY, other=float("-inf")), token


@triton.jit
def ladder_kernel(
    logits, temperature, top_k, top_p, min_p, best, arg, counts, masses, chunks,
    VOCABULARY: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, RUNGS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """For one chunk: how many weights reach each rung, and their sum."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    after_previous(PDL)
    scale, _k, _p, _least, _draws, filters = filters_of(
        row, temperature, top_k, top_p, min_p, VOCABULARY
    )  # pyright: ignore
    if filters:
        _each, largest, _token, _bad = gather_chunks(best, arg, row, chunks, CHUNKS)  # pyright: ignore
        x, _ids = load_chunk(logits, row, chunk, VOCABULARY, CHUNK)
        weight = weight_of(x, largest, scale)
        place = (row * chunks + chunk) * RUNGS
        for j in range(RUNGS):
            reaches = weight >= rung(j)
            tl.store(counts + place + j, tl.sum(reaches.to(tl.int32), axis=0))
            tl.store(masses + place + j, tl.sum(tl.where(reaches, weight, 0.0), axis=0))


@triton.jit
def pack_kernel(
    logits, temperature, top_k, top_p, min_p, best, arg, sums, counts, masses, packed, packed_ids,
    sizes, chunks,
    VOCABULARY: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, RUNGS: tl.constexpr,
    CANDIDATES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Choose the highest rung that is surely below the threshold; pack what reaches it. Size -1: no
    rung will do."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    after_previous(PDL)
    scale, k, p, least, _draws, filters = filters_of(
        row, temperature, top_k, top_p, min_p, VOCABULARY
    )  # pyright: ignore
    if filters:
        each, largest, _token, _bad = gather_chunks(best, arg, row, chunks, CHUNKS)  # pyright: ignore
        c = tl.arange(0, CHUNKS)
        j = tl.arange(0, RUNGS)
        place = (row * chunks + c[:, None]) * RUNGS + j[None, :]
        count = tl.load(counts + place, mask=(c < chunks)[:, None], other=0)
        mass = tl.load(masses + place, mask=(c < chunks)[:, None], other=0.0)
        total = tl.load(sums + row * chunks + c, mask=c < chunks, other=0.0)
        total = tl.sum(total * weight_of(each, largest, scale), axis=0)
        counted = tl.sum(count, axis=0)
        # A little more than is needed, since these sums and the later ones round differently.
        by_count = (k > 0) & (counted >= k)
        by_mass = (p < 1.0) & (tl.sum(mass, axis=0) >= p * total * 1.0001)
        reached = by_count | by_mass | (rung(j) <= least)
        # Top-p after top-k is a share of what top-k leaves, which must then be packed whole.
        reached = tl.where((k > 0) & (p < 1.0), by_count, reached)
        fits = reached & (counted <= CANDIDATES)
        chosen = tl.min(tl.where(fits, j, RUNGS), axis=0)
        one = (j == chosen)[None, :]
        before = tl.sum(tl.sum(tl.where(one & (c < chunk)[:, None], count, 0), axis=1), axis=0)
        if chunk == 0:
            size = tl.sum(tl.where(j == chosen, counted, 0), axis=0)
            tl.store(sizes + row, tl.where(chosen < RUNGS, size, -1))
        if chosen < RUNGS:
            x, token = load_chunk(logits, row, chunk, VOCABULARY, CHUNK)
            weight = weight_of(x, largest, scale)
            reaches = weight >= rung(chosen)
            spot = row * CANDIDATES + before + tl.cumsum(reaches.to(tl.int32), axis=0) - 1
            tl.store(packed + spot, weight, mask=reaches)
            tl.store(packed_ids + spot, token, mask=reaches)


@triton.jit
def reach(
    logits, row, chunks, largest, scale, edge,
    VOCABULARY: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """(count, mass) of a whole row's weights that reach `edge`."""
    count = (edge * 0.0).to(tl.int32)
    mass = edge * 0.0
    for chunk in range(chunks):
        x, _ids = load_chunk(logits, row, chunk, VOCABULARY, CHUNK)  # pyright: ignore
        weight = weight_of(x, largest, scale)
        reaches = weight >= edge
        count += tl.sum(reaches.to(tl.int32), axis=0)
        mass += tl.sum(tl.where(reaches, weight, 0.0), axis=0)
    return count, mass


@triton.jit
def edge_of_row(
    logits, row, chunks, largest, scale, k, p,
    VOCABULARY: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The threshold of top-k, then top-p, searched over the whole row bit by bit."""
    by_count = k * 0
    if k > 0:
        for i in range(30):
            trial = by_count | (1 << (29 - i))
            edge = trial.to(tl.float32, bitcast=True)
            count, _mass = reach(logits, row, chunks, largest, scale, edge, VOCABULARY, CHUNK)  # pyright: ignore
            by_count = tl.where(count >= k, trial, by_count)
    by_mass = k * 0
    if p < 1.0:
        low = by_count.to(tl.float32, bitcast=True)
        _count, total = reach(logits, row, chunks, largest, scale, low, VOCABULARY, CHUNK)  # pyright: ignore
        for i in range(30):
            trial = by_mass | (1 << (29 - i))
            edge = trial.to(tl.float32, bitcast=True)
            _count, mass = reach(logits, row, chunks, largest, scale, edge, VOCABULARY, CHUNK)  # pyright: ignore
            by_mass = tl.where(mass >= p * total, trial, by_mass)
    return tl.maximum(by_count, by_mass).to(tl.float32, bitcast=True)


@triton.jit
def draw_from_row(
    logits, row, chunks, largest, scale, edge, share,
    VOCABULARY: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Draw from the weights of a whole row that reach `edge`, by a share in [0, 1) of their sum."""
    _count, total = reach(logits, row, chunks, largest, scale, edge, VOCABULARY, CHUNK)  # pyright: ignore
    target = share * total
    before = total * 0.0
    token = (total * 0.0).to(tl.int32)
    done = token
    for chunk in range(chunks):
        x, ids = load_chunk(logits, row, chunk, VOCABULARY, CHUNK)
        weight = weight_of(x, largest, scale)
        weight = tl.where(weight >= edge, weight, 0.0)
        mass = tl.sum(weight, axis=0)
        # Until the sum passes the target, the last chunk with any weight holds the answer.
        if (done == 0) & (mass > 0.0):
            token = pick(weight, ids, target - before, CHUNK)
            done = tl.where(before + mass > target, 1, 0)
        before += mass
    return token


@triton.jit
def draw_kernel(
    logits, temperature, top_k, top_p, min_p, seeds, steps, best, arg, sums, packed, packed_ids,
    sizes, ids_out, bad_out, chunks,
    VOCABULARY: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    CANDIDATES: tl.constexpr, FILTERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    after_previous(PDL)
    scale, k, p, least, draws, filters = filters_of(
        row, temperature, top_k, top_p, min_p, VOCABULARY
    )  # pyright: ignore
    each, largest, token, bad = gather_chunks(best, arg, row, chunks, CHUNKS)  # pyright: ignore
    tl.store(bad_out + row, bad)
    if draws & (bad == 0):
        share = uniform_of(tl.load(seeds + row).to(tl.int64), tl.load(steps + row))
        if filters & FILTERED:
            size = tl.load(sizes + row)
            if size >= 0:
                n = tl.arange(0, CANDIDATES)
                place = row * CANDIDATES + n
                weight = tl.load(packed + place, mask=n < size, other=0.0)
                ids = tl.load(packed_ids + place, mask=n < size, other=0)
                edge = 0.0
                if k > 0:
                    edge = edge_by_count(weight, k)
                if p < 1.0:
                    share_of = tl.sum(tl.where(weight >= edge, weight, 0.0), axis=0)
                    if k == 0:
                        # A share of all there is, which may be more than was packed.
                        c = tl.arange(0, CHUNKS)
                        mass = tl.load(sums + row * chunks + c, mask=c < chunks, other=0.0)
                        share_of = tl.sum(mass * weight_of(each, largest, scale), axis=0)
                    edge = tl.maximum(edge, edge_by_mass(weight, p * share_of))
                floor = tl.maximum(edge, least)
                weight = tl.where(weight >= floor, weight, 0.0)
                token = pick(weight, ids, share * tl.sum(weight, axis=0), CANDIDATES)
            else:
                edge = edge_of_row(logits, row, chunks, largest, scale, k, p, VOCABULARY, CHUNK)
                edge = tl.maximum(edge, least)
                token = draw_from_row(
                    logits, row, chunks, largest, scale, edge, share, VOCABULARY, CHUNK
                )
        else:
            # Nothing is filtered: the sums of the chunks lead to the one that holds the answer.
            c = tl.arange(0, CHUNKS)
            mass = tl.load(sums + row * chunks + c, mask=c < chunks, other=0.0)
            mass *= weight_of(each, largest, scale)
            target = share * tl.sum(mass, axis=0)
            chunk = pick(mass, c, target, CHUNKS)
            before = tl.sum(tl.where(c < chunk, mass, 0.0), axis=0)
            x, ids = load_chunk(logits, row, chunk, VOCABULARY, CHUNK)
            token = pick(weight_of(x, largest, scale), ids, target - before, CHUNK)
    tl.store(ids_out + row, token)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    steps: torch.Tensor,
    *,
    filtered: bool = True,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one id a row of logits [S, V] float32: ids [S] int32, bad [S] bool.

    temperature, top_p, min_p [S] float32, top_k [S] int32 (0 or less: all), seeds [S] int64, steps
    [S]. Rows of temperature under 1e-5 take their largest logit; bad ones (a NaN, or nothing above
    -inf) id 0. A row's draw depends on its own logits, seed and step, to the bit. `filtered` False
    promises that no row filters, and saves two kernels. Raises ValueError for logits of another
    form.
    """
    rows, vocabulary = check_logits(logits)
    for name, one in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
        require(one.shape == (rows,) and one.dtype == torch.float32, f"{name} must be [S] float32")
    device = logits.device
    ids = torch.empty(rows, dtype=torch.int32, device=device)
    bad = torch.empty(rows, dtype=torch.bool, device=device)
    if rows == 0:
        return ids, bad
    best, arg, sums = scan(logits, temperature, pdl=pdl)
    chunks = best.shape[1]
    asked = (logits, temperature, top_k, top_p, min_p)
    sizes = {"VOCABULARY": vocabulary, "CHUNK": CHUNK, "CHUNKS": power_of_two(chunks)}
    packed, packed_ids, packed_sizes = best, arg, arg
    if filtered:
        counts = torch.empty(rows, chunks, RUNGS, dtype=torch.int32, device=device)
        masses = torch.empty(rows, chunks, RUNGS, dtype=torch.float32, device=device)
        packed = torch.empty(rows, CANDIDATES, dtype=torch.float32, device=device)
        packed_ids = torch.empty(rows, CANDIDATES, dtype=torch.int32, device=device)
        packed_sizes = torch.empty(rows, dtype=torch.int32, device=device)
        start(
            ladder_kernel, (rows, chunks), *asked, best, arg, counts, masses, chunks,
            **sizes, RUNGS=RUNGS, device=device, pdl=pdl, warps=8,
        )  # fmt: skip
        start(
            pack_kernel, (rows, chunks), *asked, best, arg, sums, counts, masses, packed,
            packed_ids, packed_sizes, chunks, **sizes, RUNGS=RUNGS, CANDIDATES=CANDIDATES,
            device=device, pdl=pdl, warps=8,
        )  # fmt: skip
    start(
        draw_kernel, (rows,), *asked, seeds, steps, best, arg, sums, packed, packed_ids,
        packed_sizes, ids, bad, chunks, **sizes, CANDIDATES=CANDIDATES, FILTERED=filtered,
        device=device, pdl=pdl, warps=8,
    )  # fmt: skip
    return ids, bad
