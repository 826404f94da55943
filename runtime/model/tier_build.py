"""The tiers below the device's KV, as the settings want them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from ..config import EngineConfig
from ..memory.block_chain import BlockNames
from ..memory.block_files import BlockFiles
from ..memory.disk_tier import MOST_WRITES, DiskTier
from ..memory.tiers import Tiers
from ..protocol.errors import BadInputError
from ..server_secret import cache_folder, server_secret
from .build import device_of, dtype_of
from .config import ModelConfig
from .fingerprint import fingerprint
from .kv_transfer import KVTransfer, block_bytes
from .store import ModelFiles

GIB = 1 << 30
DISK_GB = 32.0
BUFFER_ROWS = 4 * MOST_WRITES
"""Blocks of host memory through which the disk is read and written, where no more was asked
for."""


LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def build_tiers(
    config: EngineConfig,
    files: ModelFiles,
    kv: torch.Tensor,
    stage: Callable[[str], None] = lambda _: None,
) -> Tiers | None:
    """``None`` where no tier is asked for. Raises `BadInputError` for sizes that make no sense or
    are not there, and for a folder that cannot be used."""
    if not config.host_cache_gb and config.disk_cache_dir is None:
        return None
    size = block_bytes(kv)
    rows = _host_rows(config, size)
    disk = None
    said: list[str] = []
    if config.host_cache_gb:
        said.append(f"{rows * size / GIB:.2f} GiB of host memory")
    if config.disk_cache_dir is not None:
        disk = _disk(config, files, kv)
        room = disk.limit * disk.files.disk_bytes / GIB
        said.append(
            f"{room:.2f} GiB in {config.disk_cache_dir} ({len(disk)} of {disk.limit} blocks there)"
        )
    stage(f"KV cache tiers: {', '.join(said)}")
    try:
        transfer = KVTransfer(kv, rows or BUFFER_ROWS)
    except (MemoryError, RuntimeError) as error:
        raise BadInputError(
            f"host_cache_gb={config.host_cache_gb:g}: the memory cannot be had ({error})",
            param="host_cache_gb",
        ) from error
    names = BlockNames(server_secret(config.disk_cache_dir, "names of blocks"))
    return Tiers(transfer, names, disk, only_buffer=not config.host_cache_gb)


def _host_rows(config: EngineConfig, size: int) -> int:
    asked = config.host_cache_gb
    if not asked:
        return 0
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    allowed = min([memory, *_limits()])
    if asked * GIB > allowed:
        place = "this machine has" if allowed == memory else "this container may use"
        raise BadInputError(
            f"host_cache_gb={asked:g}: {place} {allowed / GIB:.1f} GiB", param="host_cache_gb"
        )
    rows = int(asked * GIB) // size
    if not rows:
        raise BadInputError(
            f"host_cache_gb={asked:g}: the KV of 16 tokens takes {size / GIB:.6f} GiB",
            param="host_cache_gb",
        )
    return rows


def _limits() -> Iterator[int]:
    """Bytes beyond which a container is killed, which would be once the tier is full."""
    for path in LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such file; no limit in it
            yield int(Path(path).read_text())


def _disk(config: EngineConfig, files: ModelFiles, kv: torch.Tensor) -> DiskTier:
    assert config.disk_cache_dir is not None
    stamp = fingerprint(
        config, files, ModelConfig.load(files), kv, dtype_of(config, device_of(config))
    )
    folder = cache_folder(config.disk_cache_dir) / stamp.hex()[:32]
    secret = server_secret(config.disk_cache_dir, "seals of blocks")
    blocks = BlockFiles(folder, stamp, secret, block_bytes(kv))
    limit = int((config.disk_cache_gb or DISK_GB) * GIB)
    if limit < blocks.disk_bytes:
        raise BadInputError(
            f"disk_cache_gb={config.disk_cache_gb:g}: the KV of 16 tokens takes "
            f"{blocks.disk_bytes / GIB:.6f} GiB",
            param="disk_cache_gb",
        )
    return DiskTier(blocks, limit)
