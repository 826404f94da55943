"""Compile for an H200, without a GPU, every kernel that the launchers launch for a model's shapes.

Run by test_compile.py as a process of its own: ``python compile_kernels.py MODEL`` prints one JSON
object a line. The launchers run on tensors without memory; what they would launch is caught and
compiled with the same constants.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from ramet.kernels import (
    activation,
    embed,
    invariant,
    launch,
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
from ramet.kernels.operands import Norm, Rotation
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

MODELS = {
    # name: (hidden, inner, heads, kv heads, head dim, vocabulary, bias)
    "llama-3.1-8b": (4096, 14336, 32, 8, 128, 128256, False),
    "qwen2.5-1.5b": (1536, 8960, 12, 2, 128, 151936, True),
    "smollm2-135m": (576, 1536, 9, 3, 64, 49152, False),
}

NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}
OPTIONS = ("num_warps", "num_stages", "launch_pdl", "num_ctas", "maxnreg")


def type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + NAMES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def compiled(kernel: JITFunction, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Compile one launch as Triton would: pointers and multiples of 16 are known to be aligned."""
    options = {name: keywords[name] for name in OPTIONS if name in keywords}
    values = dict(zip(kernel.arg_names, arguments)) | {
        name: value for name, value in keywords.items() if name not in OPTIONS
    }
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        signature[parameter.name] = type_of(value)
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def measure(binary: Any) -> dict[str, Any]:
    """Registers, spilled bytes and shared memory of a compiled kernel, and the instructions that
    matter."""
    ptx = binary.asm["ptx"]
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        target = re.search(r"\.target (\w+)", ptx)
        report = subprocess.run(
            [ptxas, "-v", f"--gpu-name={target[1] if target else 'sm_90a'}", path, "-o",
            path.with_suffix(".o")], capture_output=True,
            text=True,
            check=True,
        ).stderr  # fmt: skip
    return {
        "shared": binary.metadata.shared,
        "registers": int(re.search(r"Used (\d+) registers", report)[1]),
        "spills": int(re.search(r"(\d+) bytes spill stores", report)[1]),
        "cp.async": len(re.findall(r"cp\.async\.c[ag]", ptx)),
        "wgmma": len(re.findall(r"wgmma\.mma_async", ptx)),
        "mma": len(re.findall(r"mma\.sync", ptx)),
        "griddepcontrol": len(re.findall(r"griddepcontrol", ptx)),
        "wide loads": len(re.findall(r"ld\.global[\w.:]*\.v4\.b32", ptx)),
    }


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def meta_for(items: int, tokens: int, max_q: int, max_kv: int) -> AttentionMeta:
    i32 = torch.int32
    return AttentionMeta(
        table=empty(256, 8192, dtype=i32),
        rows=empty(items, dtype=i32),
        q_start=empty(items + 1, dtype=i32),
        kv_lens=empty(items, dtype=i32),
        max_q=max_q,
        max_kv=max_kv,
    )


def run_launchers(model: str) -> None:
    """Launch what a decode step of batch 1 and 64 and a prefill launch."""
    hidden, inner, heads, kv_heads, dim, vocabulary, biased = MODELS[model]
    i32, i64 = torch.int32, torch.int64
    for tokens in (1, 72):
        x = empty(tokens, hidden)
        norm.rms_norm(x, empty(hidden), 1e-5, pdl=True)
        norm.add_rms_norm(x, empty(tokens, hidden), empty(hidden), 1e-5, pdl=True)
        activation.gate(empty(tokens, 2 * inner), "silu", pdl=True)
        embed.embed(empty(tokens, dtype=i32), empty(vocabulary, hidden), pdl=True)
        caches = empty(1 << 20, kv_heads, dim), empty(1 << 20, kv_heads, dim)
        rope.rope_write(
            empty(tokens, (heads + 2 * kv_heads) * dim), empty(tokens, dtype=i32),
            empty(tokens, dtype=i64), empty(8192, dim, dtype=torch.float32), *caches,
            heads, kv_heads, dim, pdl=True,
        )  # fmt: skip
        q = empty(tokens, heads, dim)
        decode.decode(q, *caches, meta_for(tokens, tokens, 1, 8192), dim**-0.5, pdl=True)
    for few in (1, 8):
        x, inside = empty(few, hidden), empty(few, inner)
        qkv = (heads + 2 * kv_heads) * dim
        extra = empty(qkv) if biased else None
        small_batch.norm_linear(x, empty(hidden), 1e-5, empty(qkv, hidden), extra, pdl=True)
        turn = Rotation(
            empty(few, dtype=i32), empty(few, dtype=i64), empty(8192, dim, dtype=torch.float32),
            *caches, heads, kv_heads, dim,
        )  # fmt: skip
        small_batch.norm_rotate(
            x, empty(hidden), 1e-5, empty(qkv, hidden), extra, turn, pdl=True
        )  # fmt: skip
        small_batch.linear_add(empty(few, heads * dim), empty(hidden, heads * dim), x, pdl=True)
        weight = empty(2 * inner, hidden)
        small_batch.norm_gate_up(x, empty(hidden), 1e-5, weight, "silu", pdl=True)
        small_batch.linear_add(inside, empty(hidden, inner), x, pdl=True)
    for rows_, tiles in (
        (16, mid_batch.Tiles(64, 128, 4, 4)),
        (64, mid_batch.Tiles(64, 128, 4, 4)),
        (128, mid_batch.Tiles(128, 64, 8, 4)),
    ):
        x, inside, weight = empty(rows_, hidden), empty(rows_, inner), empty(2 * inner, hidden)
        mid_batch.mid_gate_up(x, weight, "silu", tiles=tiles, pdl=True)
        sliced = tiles._replace(slices=3)
        mid_batch.mid_linear_add(
            inside, empty(hidden, inner), x, tiles=sliced, norm=Norm(empty(hidden), 1e-5), pdl=True
        )
        mid_batch.mid_linear(x, empty(hidden, hidden), empty(hidden), tiles=tiles, pdl=True)
    # Sampling knows of a model only its vocabulary: one model's is enough.
    for count in (1, 64) if biased else ():
        x = empty(count, vocabulary, dtype=torch.float32)
        f32, whole = empty(count, dtype=torch.float32), empty(count, dtype=i64)
        words = empty(count, -(-vocabulary // 32), dtype=i32)
        rows.greedy(x, pdl=True)
        ints = empty(count, dtype=i32)
        rows.take_greedy(x, ints, ints, pdl=True)
        step.enter_decode(ints, ints, ints, ints, empty(count, 64, dtype=i32), pdl=True)
        rows.token_logprobs(x, empty(count, dtype=i32), pdl=True)
        for filtered in (False, True):
            sampling.sample(
                x, f32, empty(count, dtype=i32), f32, f32, whole, whole,
                filtered=filtered, pdl=True,
            )  # fmt: skip
        logits.mask_(x, words, pdl=True)
        logits.mask_(x, words, empty(len(words), dtype=i32), empty(len(words), dtype=i32), pdl=True)
        counts = empty(64, vocabulary, dtype=i32)
        logits.penalize_(x, whole, counts, f32, f32, f32, prompt_bit=1 << 30, pdl=True)
    for count in (1, 512):
        invariant.invariant_linear(empty(count, hidden), empty(hidden, hidden))
    for tokens in (64, 8192):
        q = empty(tokens, heads, dim)
        some = meta_for(2, tokens, tokens, 8192)
        extend.extend(q, *caches, some, dim**-0.5)
        some.ancestry = Ancestry(*(empty(n, dtype=i32) for n in (2, 2, tokens, tokens)))
        extend.extend(q, *caches, some, dim**-0.5)
    float8 = [empty(1 << 20, kv_heads, dim, dtype=torch.float8_e4m3fn) for _ in range(2)]
    decode.decode(empty(64, heads, dim), *float8, meta_for(64, 64, 1, 8192), dim**-0.5)
    shape = tree.shape_for(heads, kv_heads, dim, torch.bfloat16, 64, torch.device("cpu"))
    work = tree.work_for(shape, dim, torch.device("meta"))
    q, table, kv_lens = empty(64, heads, dim), empty(256, 8192, dtype=i32), empty(64, dtype=i32)
    for pair in (caches, float8):
        tree.tree_decode(q, *pair, table, kv_lens, work, dim**-0.5, pdl=True)
    merge.merge(
        empty(8, 4, heads, dim, dtype=torch.float32), empty(8, 4, heads, dtype=torch.float32)
    )


def main() -> None:
    launches: list[tuple[JITFunction, tuple[Any, ...], dict[str, Any]]] = []

    def catch(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        launches.append((self, arguments, keywords))

    JITFunction.run = catch
    for module in (launch, mid_batch):
        module.dependent_launch = lambda device, wanted: wanted
    run_launchers(sys.argv[1])
    seen: set[str] = set()
    for kernel, arguments, keywords in launches:
        constants = {
            name: value
            for name, value in keywords.items()
            if isinstance(value, (int, str)) and name not in OPTIONS
        }
        types = [type_of(value) for value in arguments]
        if (same := f"{kernel.__name__} {types} {keywords}") in seen:
            continue
        seen.add(same)
        result = measure(compiled(kernel, arguments, keywords))
        result |= {"kernel": kernel.__name__, "constants": constants}
        result |= {name: keywords[name] for name in OPTIONS if name in keywords}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
