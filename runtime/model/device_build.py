"""Brings a model up on a CUDA device: load, choose kernels, measure, take KV, capture."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import cast

import torch

from ...kernels.ops import Ops, ops_for
from ...kernels.tuning import AT_START, Product, table_for
from ..config import EngineConfig
from ..protocol.errors import ModelError
from .config import ModelConfig
from .device_runner import PAGE, DeviceRunner

log = logging.getLogger(__name__)


def products_of(model: ModelConfig) -> list[Product]:
    """Every linear of the model at the row counts for which kernels are chosen by measurement."""
    hidden, ffn = model.hidden_size, model.ffn_size
    heads = model.num_heads * model.head_dim
    qkv = heads + 2 * model.num_kv_heads * model.head_dim
    return [
        product
        for rows in AT_START
        for product in (
            Product(rows, qkv, hidden, normed=True),
            Product(rows, hidden, heads),
            Product(rows, ffn, hidden, gated=True),
            Product(rows, hidden, ffn),
            Product(rows, model.vocab_size, hidden),
        )
    ]


def _ops_of(config: EngineConfig, device: torch.device) -> Ops:
    if not config.enable_deterministic_inference:
        return ops_for(device)
    from ...kernels.device_ops import DeviceOps

    return cast("Ops", DeviceOps(invariant=True))


def build_device_runner(
    config: EngineConfig,
    model: ModelConfig,
    weights: Callable[[], Iterable[tuple[str, torch.Tensor]]],
    *,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    context: int,
    step_tokens: int,
    stage: Callable[[str], None],
) -> DeviceRunner:
    """Load, measure the largest step, give the rest of the memory to KV, capture."""
    clock = time.monotonic()
    total = torch.cuda.get_device_properties(device).total_memory

    def spent(what: str) -> None:
        nonlocal clock
        now = time.monotonic()
        log.info("%s: %.1f s", what, now - clock)
        clock = now

    try:
        stage(f"weights of {name} ({str(dtype).removeprefix('torch.')} on {device})")
        runner = DeviceRunner(
            model,
            weights(),
            dtype=dtype,
            max_rows=config.max_running_requests,
            context_length=context,
            device=device,
            ops=_ops_of(config, device),
        )
        torch.cuda.synchronize()
        used = torch.cuda.memory_allocated()
        spent(f"weights, {used / 2**30:.2f} GiB")
        if dtype == torch.bfloat16 and not config.enable_deterministic_inference:
            stage("choosing kernels")
            for line in table_for(device).measure(products_of(model), device):
                log.info("%s", line)
            spent("kernels chosen")
        stage("measuring the largest step")
        peak = runner.profile(step_tokens)
        torch.cuda.empty_cache()
        spent(f"the largest step, {peak / 2**30:.2f} GiB")
        each = 2 * model.num_layers * model.num_kv_heads * model.head_dim * dtype.itemsize
        free, _ = torch.cuda.mem_get_info(device)
        budget = int(min(total * config.mem_fraction_static - used, free) - 1.25 * peak)
        slots = budget // each
        if config.max_total_tokens is not None:
            slots = min(slots, config.max_total_tokens)
        slots = slots // PAGE * PAGE
        if slots < PAGE:
            allowed = total * config.mem_fraction_static
            raise ModelError(
                f"no room for KV: weights take {used / 2**30:.1f} GiB and the largest step "
                f"{peak / 2**30:.1f} of {allowed / 2**30:.1f} GiB; raise mem_fraction_static or "
                "lower chunked_prefill_size"
            )
        runner.take_memory(slots + PAGE)
        spent(f"KV for {slots} tokens, {slots * each / 2**30:.2f} GiB")
        if not config.disable_cuda_graph:
            largest = min(config.cuda_graph_max_bs, config.max_running_requests)
            runner.capture(largest, stage, trees=not config.disable_tree_attention)
            spent("captured steps")
        return runner
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"the device's memory is too small ({error}); lower chunked_prefill_size, "
            "max_running_requests or mem_fraction_static"
        ) from error
