"""Launch every kernel on small, ragged shapes, for a memory checker to watch.

    compute-sanitizer --tool memcheck python tests/gpu/touch_kernels.py [PART] …

Results are looked at elsewhere; here every access has to be inside its tensor. Torch's caching
allocator is off, so that each tensor is an allocation of its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from functools import partial

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import numpy as np
import torch
from ramet.kernels import (
    activation,
    embed,
    invariant,
    logits,
    mid_batch,
    norm,
    rope,
    rows,
    sampling,
    small_batch,
    step,
)
from ramet.kernels.attention import decode, extend, merge, tree
from ramet.kernels.attention.meta import Ancestry, AttentionMeta
from ramet.kernels.attention.worklist import make_list
from ramet.kernels.operands import Norm, Rotation
from ramet.kernels.reference.sampling import PROMPT_BIT

BF16, I32, I64 = torch.bfloat16, torch.int32, torch.int64
DEVICE = torch.device("cuda")


def randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def ints(*values: int, dtype: torch.dtype = I32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def linears() -> None:
    for rows_, n, k in ((1, 40, 136), (3, 48, 300), (13, 100, 192), (16, 96, 256)):
        x, weight, gain = randn(rows_, k), randn(n, k), randn(k)
        both, back = randn(2 * n, k), randn(rows_, n)
        wide = [small_batch.Plan(16, 32, 4, 3, 4), small_batch.Plan(32, 64, 4, 4, 1)]
        narrow = [small_batch.Plan(4, 64, 4, 0), small_batch.Plan(8, 128, 4, 0, before=2)]
        for plan in wide if rows_ > 1 else narrow:
            small_batch.small_linear(x, weight, randn(n), plan=plan, pdl=True)
            small_batch.norm_linear(x, gain, 1e-5, weight, plan=plan, pdl=True)
            small_batch.norm_gate_up(x, gain, 1e-5, both, "silu", plan=plan, pdl=True)
            small_batch.linear_add(x, weight, back, plan=plan, pdl=True)
    for rows_ in (1, 9):
        caches = [randn(20, 2, 64) for _ in range(2)]
        where = torch.arange(rows_, device=DEVICE)
        turn = Rotation(
            where.to(I32), where, randn(20, 64, dtype=torch.float32), *caches, 4, 2, 64
        )  # fmt: skip
        small_batch.norm_rotate(
            randn(rows_, 192), randn(192), 1e-5, randn(512, 192), randn(512), turn, pdl=True
        )  # fmt: skip
    for rows_, n, k in (
        (5, 40, 136),
        (16, 96, 256),
        (33, 100, 300),
        (64, 192, 512),
        (200, 72, 192),
    ):
        x, weight, residual = randn(rows_, k), randn(n, k), randn(rows_, n)
        for tiles in (
            mid_batch.Tiles(64, 64, 4, 4),
            mid_batch.Tiles(64, 64, 4, 6, slices=3),
            mid_batch.Tiles(128, 64, 8, 3, slices=2),
        ):
            mid_batch.mid_linear(x, weight, randn(n), tiles=tiles, pdl=True)
            after = Norm(randn(n), 1e-5)
            mid_batch.mid_linear_add(x, weight, residual, tiles=tiles, norm=after, pdl=True)
            if tiles.slices == 1:
                mid_batch.mid_gate_up(x, randn(2 * n, k), "silu", tiles=tiles, pdl=True)
        invariant.invariant_linear(x, weight, randn(n), pdl=True)


def elementwise() -> None:
    for tokens, width in ((1, 96), (7, 300), (70, 576)):
        x = randn(tokens, width)
        norm.rms_norm(x, randn(width), 1e-5, pdl=True)
        norm.add_rms_norm(x, randn(tokens, width), randn(width), 1e-5, pdl=True)
        activation.gate(randn(tokens, 2 * width), "silu", pdl=True)
        ids = torch.randint(0, 50, (tokens,), dtype=I32, device=DEVICE)
        embed.embed(ids, randn(50, width), pdl=True)


HEADS = {64: (4, 4), 80: (6, 2), 96: (9, 3), 128: (12, 2), 256: (8, 4)}


def attention(dims: Iterable[int] = HEADS) -> None:
    for dim in dims:
        heads, kv_heads = HEADS[dim]
        lengths, queries = [1, 37, 130, 300], [1, 5, 130, 64]
        width, total = max(lengths), sum(queries)
        slots = torch.randperm(len(lengths) * width, device=DEVICE).view(len(lengths), width)
        table, items = slots.to(I32), ints(*range(len(lengths)))
        one = AttentionMeta(table, items, ints(*range(len(lengths) + 1)), ints(*lengths), 1, width)
        starts = ints(0, *torch.tensor(queries).cumsum(0).tolist())
        many = AttentionMeta(table, items, starts, ints(*lengths), max(queries), width)
        nodes = [0, 5, 130, 60]  # each the child of the one before
        trees = AttentionMeta(table, items, starts, ints(*lengths), max(queries), width)
        trees.ancestry = Ancestry(
            ints(*(length - n for length, n in zip(lengths, nodes))),
            ints(0, 0, 5, 135),
            ints(*(n for n in nodes for _ in range(n))),
            ints(*(i for n in nodes for i in range(n))),
        )
        all_options = ({}, {"window": 40}, {"softcap": 5.0, "sinks": randn(heads)})
        for kv_dtype in (BF16, torch.float8_e4m3fn) if dim == 128 else (BF16,):
            k, v = (randn(slots.numel(), kv_heads, dim, dtype=kv_dtype) for _ in range(2))
            for options in all_options if dim in (64, 128) else ({},):
                decode.decode(randn(len(lengths), heads, dim), k, v, one, 0.1, **options)
                extend.extend(randn(total, heads, dim), k, v, many, 0.1, **options)
                extend.extend(randn(total, heads, dim), k, v, trees, 0.1, **options)
            positions = torch.arange(total, dtype=I32, device=DEVICE) % width
            rope.rope_write(
                randn(total, (heads + 2 * kv_heads) * dim), positions,
                slots.flatten()[:total].contiguous(), randn(width, dim, dtype=torch.float32), k, v,
                heads, kv_heads, dim, pdl=True,
            )  # fmt: skip
    parts = randn(5, 3, 6, 64, dtype=torch.float32)
    merge.merge(parts, randn(5, 3, 6, dtype=torch.float32), pdl=True)


def trees(dims: Iterable[int] = HEADS) -> None:
    """Two levels of shared keys, ragged tails, and rows that pad the step."""
    tails = np.array([170, 200, 200, 170, 170], np.int32)
    kv_lens = tails + np.array([1, 37, 130, 300, 5], np.int32)
    places = [np.arange(512) + (np.arange(512) >= tail) * 512 * i for i, tail in enumerate(tails)]
    table = torch.tensor(np.array(places), dtype=I32, device=DEVICE)
    lens = ints(*kv_lens.tolist(), 1, 1)
    lists = np.array([0, 170]), np.array([170, 200]), np.array([0, 5, 7]), np.arange(7) % 5 + 0
    lists[3][5:] = 1, 2
    for dim in dims:
        for heads, kv_heads in ((4, 4), (6, 2), (40, 2)):
            for kv_dtype in (BF16, torch.float8_e4m3fn):
                k, v = (randn(512 * 6, kv_heads, dim, dtype=kv_dtype) for _ in range(2))
                shape = tree.shape_for(heads, kv_heads, dim, BF16, 7, DEVICE)
                work = tree.work_for(shape, dim, DEVICE)
                rows_ = np.arange(5, dtype=np.int32)
                made = make_list(rows_, kv_lens, *lists, tails, shape)
                assert made is not None
                work.fill(made)
                q = randn(7, heads, dim)
                for options in ({}, {"softcap": 5.0}, {"sinks": randn(heads)}):
                    tree.tree_decode(q, k, v, table, lens, work, 0.1, pdl=True, **options)


def choosing() -> None:
    for count, vocabulary in ((1, 1000), (5, 8200), (70, 333)):
        x = randn(count, vocabulary, dtype=torch.float32)
        f32 = torch.full((count,), 0.9, device=DEVICE)
        seeds = torch.arange(count, dtype=I64, device=DEVICE)
        top_k = torch.full((count,), 5, dtype=I32, device=DEVICE)
        rows.greedy(x, pdl=True)
        at = seeds.to(I32)
        rows.take_greedy(x, at, at.clone(), pdl=True)
        step.enter_decode(
            at, at + 1, at, at, torch.zeros(count, count, dtype=I32, device=DEVICE), pdl=True
        )  # fmt: skip
        rows.token_logprobs(x, seeds.to(I32), pdl=True)
        rows.top_logprobs(x, 4, pdl=True)
        for filtered in (False, True):
            sampling.sample(
                x, f32, top_k, f32, f32 * 0, seeds, seeds, filtered=filtered, pdl=True
            )  # fmt: skip
        words = torch.full((count, -(-vocabulary // 32)), -1, dtype=I32, device=DEVICE)
        logits.mask_(x, words, pdl=True)
        few = torch.zeros(len(words), dtype=torch.int32, device=x.device)
        logits.mask_(x, words[:1], few, few, pdl=True)
        counts = torch.zeros(count, vocabulary, dtype=I32, device=DEVICE)
        logits.penalize_(x, seeds, counts, f32, f32, f32, prompt_bit=PROMPT_BIT, pdl=True)


PARTS: dict[str, Callable[[], None]] = {
    "linears": linears,
    "elementwise": elementwise,
    "choosing": choosing,
    **{f"attention-{dim}": partial(attention, [dim]) for dim in HEADS},
    **{f"trees-{dim}": partial(trees, [dim]) for dim in HEADS},
}


def main(names: list[str]) -> None:
    for name in names or PARTS:
        PARTS[name]()
        torch.cuda.synchronize()
        print("touched", name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
