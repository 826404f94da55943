"""Kernels that let the next one start before they have waited: a captured chain of layers gives the
bits that it gives when every kernel waits for the end of the one before."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, DIM, LENGTH = 6, 1536, 8960, 12, 2, 128, 700
BF16 = torch.bfloat16


class Chain:
    """Decoder layers with random weights over KV of equal lengths."""

    def __init__(self, rows: int) -> None:
        from ramet.kernels.attention.meta import AttentionMeta

        torch.manual_seed(rows)
        self.rows = rows
        self.device = torch.device("cuda", torch.cuda.current_device())
        heights = ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN)
        shapes = [heights, (HIDDEN, HEADS * DIM), (2 * INNER, HIDDEN), (HIDDEN, INNER)]
        self.weights = [[self.randn(*s) * s[1] ** -0.5 for s in shapes] for _ in range(LAYERS)]
        self.gain, self.table = self.randn(HIDDEN), self.randn(1000, HIDDEN)
        self.kv = self.randn(LAYERS, 2, rows * LENGTH, KV_HEADS, DIM)
        i32 = {"dtype": torch.int32, "device": self.device}
        starts = torch.arange(rows + 1, **i32)
        slots = torch.randperm(rows * LENGTH, device=self.device).view(rows, LENGTH)
        lengths = torch.full((rows,), LENGTH, **i32)
        self.meta = AttentionMeta(
            slots.to(torch.int32), starts[:-1].clone(), starts, lengths, 1, LENGTH, rows
        )
        self.slots, self.positions = slots[:, -1].contiguous(), lengths - 1
        self.angles = torch.randn(LENGTH, DIM, device=self.device)
        self.ids = torch.arange(rows, **i32)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=BF16, device=self.device)

    def run(self, ops) -> torch.Tensor:
        from ramet.kernels.operands import Norm, Rotation

        x, normed, norm = ops.embed(self.ids, self.table), None, Norm(self.gain, 1e-6)
        for (qkv_w, out_w, up_w, down_w), (k, v) in zip(self.weights, self.kv):
            turn = Rotation(
                self.positions, self.slots, self.angles, k, v, HEADS, KV_HEADS, DIM
            )  # fmt: skip
            q = None
            if normed is None:
                q = ops.norm_rotate(x, self.gain, 1e-6, qkv_w, None, 0.0, turn)
            if q is None:
                qkv = ops.norm_linear(x, self.gain, 1e-6, qkv_w, normed=normed)
                q = ops.rope_write(
                    qkv, self.positions, self.slots, self.angles, k, v, HEADS, KV_HEADS, DIM
                )
            y = ops.attention(q, k, v, self.meta, DIM**-0.5)
            normed = ops.linear_add(y.view(self.rows, -1), out_w, x, norm=norm)
            inner = ops.norm_gate_up(x, self.gain, 1e-6, up_w, "silu", normed=normed)
            normed = ops.linear_add(inner, down_w, x, norm=norm)
        return ops.head(ops.rms_norm(x, self.gain, 1e-6), self.table)


@pytest.mark.parametrize("rows", [1, 5, 16, 40, 100])
def test_the_same_bits_as_without(rows):
    from ramet.kernels.device_ops import DeviceOps

    chain = Chain(rows)
    want = chain.run(DeviceOps(pdl=False))
    ops = DeviceOps()
    chain.run(ops)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        have = chain.run(ops)
    assert want.isfinite().all()
    for _ in range(50):
        have.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(have, want)
