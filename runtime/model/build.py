"""From settings and files to a runner: which device, which dtype, how many KV slots."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from ..config import EngineConfig
from ..protocol.errors import BadInputError, ModelError
from .config import ModelConfig
from .host_runner import HostRunner, auto_dtype
from .loader.weights import load_weights
from .runner import Runner
from .store import ModelFiles

PAGE = 16
"""Slots are handed out in aligned runs of this many, whatever grain the user asked for."""
_HOST_SLOTS = 65536
_HOST_SHARE = 0.3
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def device_of(config: EngineConfig) -> torch.device:
    """The device to run on. Raises `BadInputError` for one that is not there."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise BadInputError("device=cuda: torch sees no CUDA device", param="device")
    cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if cuda else "cpu")


def dtype_of(config: EngineConfig, device: torch.device) -> torch.dtype:
    return auto_dtype(device) if config.dtype == "auto" else _DTYPES[config.dtype]


def context_of(config: EngineConfig, model: ModelConfig) -> int:
    """The context to serve. Raises `BadInputError` for more than the model has."""
    asked = config.context_length
    if asked is not None and asked > model.context_length:
        raise BadInputError(
            f"context_length={asked}: the model's own is {model.context_length}",
            param="context_length",
        )
    return asked or model.context_length


def step_tokens_of(config: EngineConfig, device: torch.device, context: int) -> int:
    """How many prompt tokens a step may compute."""
    asked = config.chunked_prefill_size
    if asked is None:
        return 8192 if device.type == "cuda" else 512
    return context if asked < 0 else asked


def build_runner(
    config: EngineConfig, files: ModelFiles, stage: Callable[[str], None] = lambda _: None
) -> Runner:
    """Load the model and take KV memory. ``stage`` is told what begins.

    Raises `ModelError` or `BadInputError` saying what is wrong or what to lower.
    """
    model = ModelConfig.load(files)
    device = device_of(config)
    dtype = dtype_of(config, device)
    context = context_of(config, model)
    seed = config.random_seed or 0
    if device.type == "cuda":
        from .device_build import build_device_runner

        return build_device_runner(
            config,
            model,
            lambda: load_weights(files, model, dtype, str(device), config.load_format, seed=seed),
            name=files.name,
            device=device,
            dtype=dtype,
            context=context,
            step_tokens=step_tokens_of(config, device, context),
            stage=stage,
        )
    if config.enable_deterministic_inference:
        raise BadInputError(
            "enable_deterministic_inference: only a CUDA device promises the same bits",
            param="enable_deterministic_inference",
        )
    slots = config.max_total_tokens or _host_slots(model, dtype, context)
    stage(f"weights of {files.name} ({str(dtype).removeprefix('torch.')} on the CPU)")
    try:
        return HostRunner(
            model,
            load_weights(files, model, dtype, load_format=config.load_format, seed=seed),
            dtype=dtype,
            num_slots=slots // PAGE * PAGE + PAGE,
            max_rows=config.max_running_requests,
            context_length=context,
        )
    except (MemoryError, RuntimeError) as error:
        if "memory" not in str(error).lower():
            raise
        raise ModelError(
            f"not enough memory for {slots} KV slots; lower max_total_tokens"
        ) from error


def kv_bytes(model: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of K and V of one token in all layers."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * dtype.itemsize


def _host_slots(model: ModelConfig, dtype: torch.dtype, context: int) -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    fit = int(memory * _HOST_SHARE) // kv_bytes(model, dtype)
    return max(min(_HOST_SLOTS, fit), min(context, fit), PAGE)
