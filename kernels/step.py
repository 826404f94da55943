"""What a decode step begins and ends with: the newest tokens of its rows, and where their KV goes.

The reference is `reference.step`. A dozen tiny operations in one launch each: at small batches the
launches would be a twentieth of the step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import after_previous, ceil_div, power_of_two, require, start

LARGEST_BLOCK = 256


@triton.jit(
    do_not_specialize=["count"], do_not_specialize_on_alignment=["rows", "kv_lens", "slots"]
)
def enter_decode_kernel(
    rows,
    kv_lens,
    slots,
    last_tokens,
    table,
    ids,
    positions,
    wide_slots,
    count,
    table_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = i < count
    after_previous(PDL)
    row = tl.load(rows + i, mask=there, other=0).to(tl.int64)
    position = tl.load(kv_lens + i, mask=there, other=1) - 1
    slot = tl.load(slots + i, mask=there, other=0)
    tl.store(ids + i, tl.load(last_tokens + row, mask=there, other=0), mask=there)
    tl.store(positions + i, position, mask=there)
    tl.store(wide_slots + i, slot.to(tl.int64), mask=there)
    tl.store(table + row * table_stride + position, slot, mask=there)


def enter_decode(
    rows: torch.Tensor,
    kv_lens: torch.Tensor,
    slots: torch.Tensor,
    last_tokens: torch.Tensor,
    table: torch.Tensor,
    *,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids [B] int32 = last_tokens[rows], positions [B] int32 = kv_lens - 1, and slots [B] as int64;
    table[rows, positions] = slots.

    rows, kv_lens and slots [B] int32, last_tokens [R] int32, table [R, C] int32. Of rows that are
    the same (padding), any one's slot is noted. Raises ValueError for shapes that do not fit.
    """
    count = len(rows)
    require(kv_lens.shape == rows.shape == slots.shape, "rows, kv_lens and slots go together")
    require(table.stride(1) == 1 and len(table) == len(last_tokens), "table and last_tokens differ")
    i32 = {"dtype": torch.int32, "device": rows.device}
    ids, positions = torch.empty(count, **i32), torch.empty(count, **i32)
    wide = torch.empty(count, dtype=torch.int64, device=rows.device)
    if count:
        block = min(power_of_two(count), LARGEST_BLOCK)
        start(
            enter_decode_kernel, (ceil_div(count, block),), rows, kv_lens, slots, last_tokens,
            table, ids, positions, wide, count, table.stride(0), BLOCK=block, device=rows.device,
            pdl=pdl, warps=1,
        )  # fmt: skip
    return ids, positions, wide


def cost(count: int) -> tuple[int, int]:
    """(bytes moved, operations) for `count` rows."""
    return 9 * 4 * count, count
