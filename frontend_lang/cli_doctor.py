"""``ramet doctor``: what this machine can do, and what is missing."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

_GIB = 1 << 30
_COLOURS = {"ok": "green", "note": "yellow", "missing": "red"}
_CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")


class Finding(NamedTuple):
    """One line of the report. ``missing`` means that ramet will not work; ``note`` that it will,
    without something."""

    verdict: Literal["ok", "note", "missing"]
    subject: str
    text: str


def doctor(
    full: Annotated[
        bool, typer.Option("--full", help="Also run a program on the default model (5 s).")
    ] = False,
) -> None:
    """Check this machine. Exits with 1 when something that ramet needs is missing."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    findings = list(findings_of(full))
    for verdict, subject, text in findings:
        table.add_row(f"[{_COLOURS[verdict]}]{verdict}[/]", subject, text)
    Console().print(table)
    if any(finding.verdict == "missing" for finding in findings):
        raise typer.Exit(1)


def findings_of(full: bool) -> Iterator[Finding]:
    """Everything that was found, in order."""
    checks: list[Callable[[], Finding]] = [
        _python, _packages, _torch, _cpu, _memory, _gpu, _triton, _cache, _tiers, _model,
        _http_port, _zmq_port, _sockets,
    ]  # fmt: skip
    for check in checks:
        yield check()
    if full:
        yield _self_test()


def _python() -> Finding:
    verdict = "ok" if sys.version_info >= (3, 11) else "missing"
    return Finding(verdict, "python", f"{platform.python_version()} at {sys.executable}")


def _packages() -> Finding:
    needed = ("numpy", "tokenizers", "safetensors", "jinja2", "msgspec", "pyzmq", "httpx")
    absent = [name for name in needed if _version(name) is None]
    if absent:
        return Finding("missing", "packages", f"not installed: {', '.join(absent)}")
    return Finding("ok", "packages", ", ".join(f"{name} {_version(name)}" for name in needed))


def _torch() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("missing", "torch", "not installed")
    import torch

    return Finding("ok", "torch", f"{torch.__version__}, {torch.get_num_threads()} threads")


def _cpu() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    flags = _cpu_flags()
    have = [flag for flag in _CPU_FLAGS if flag in flags]
    text = f"{cores} cores, {platform.machine()}; {', '.join(have) or 'no vector flags seen'}"
    if "avx512_bf16" in flags or "amx_bf16" in flags:
        return Finding("ok", "cpu", f"{text}; dtype auto is bfloat16")
    return Finding("note", "cpu", f"{text}; no bfloat16 in hardware, dtype auto is float32")


def _memory() -> Finding:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / _GIB
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / _GIB
    text = f"{free:.1f} GiB of {total:.1f} GiB unused"
    return Finding("ok" if free >= 2 else "note", "memory", text)


def _gpu() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("note", "gpu", "unknown without torch")
    import torch

    if not torch.cuda.is_available():
        return Finding("note", "gpu", "none that torch can use; models run on the CPU")
    cards = [
        f"{torch.cuda.get_device_name(index)}, {torch.cuda.mem_get_info(index)[1] / _GIB:.0f} GiB"
        for index in range(torch.cuda.device_count())
    ]
    return Finding("ok", "gpu", "; ".join(cards))


def _triton() -> Finding:
    found = _version("triton")
    if found is None:
        return Finding("note", "triton", "not installed; only models on a GPU need it")
    return Finding("ok", "triton", found)


def _cache() -> Finding:
    from ramet.runtime.model import store

    folder = store.home()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not _writable(there):
        return Finding("missing", "cache", f"{folder} cannot be written; set RAMET_HOME")
    free = shutil.disk_usage(there).free / _GIB
    return Finding("ok" if free >= 1 else "note", "cache", f"{folder}, {free:.1f} GiB free")


def _tiers() -> Finding:
    from ramet.runtime.model import store

    there = next(path for path in (store.home(), *store.home().parents) if path.exists())
    host = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / _GIB
    disk = shutil.disk_usage(there).free / _GIB
    text = f"room for KV: host_cache_gb up to {host:.0f}, disk_cache_gb up to {disk:.0f} ({there})"
    return Finding("ok", "cache tiers", text)


def _model() -> Finding:
    from ramet.runtime.model import store

    rows = store.list_models()
    present = [row.alias for row in rows if row.path is not None]
    if rows[0].alias in present:
        return Finding("ok", "model", f"on this machine: {', '.join(present)}")
    return Finding("note", "model", f"`ramet models fetch {rows[0].alias}` gets the default model")


def _http_port() -> Finding:
    from ramet.runtime.config import EngineConfig

    port = EngineConfig().port
    taken = _taken(port)
    if taken is not None:
        return Finding("note", "http port", f"{port} is taken ({taken}); use --port")
    return Finding("ok", "http port", f"{port} is free for `ramet serve`")


def _zmq_port() -> Finding:
    from ramet.runtime.config import ZMQ_PORT

    taken = _taken(ZMQ_PORT)
    if taken is not None:
        return Finding("note", "zmq port", f"{ZMQ_PORT} is taken ({taken}); another will be used")
    return Finding("ok", "zmq port", f"{ZMQ_PORT} is free for `ramet serve`")


def _taken(port: int) -> str | None:
    """Why this machine's own clients could not be served there, or ``None``."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return error.strerror or str(error)
    return None


def _sockets() -> Finding:
    folder = Path(tempfile.gettempdir())
    if not _writable(folder):
        return Finding("missing", "sockets", f"{folder} cannot be written; set TMPDIR")
    return Finding("ok", "sockets", f"in {folder}")


def _self_test() -> Finding:
    from ramet.runtime.protocol import RametError

    from . import Runtime

    began = time.monotonic()
    try:
        with Runtime() as runtime:
            ready = time.monotonic()
            answer = runtime.generate(
                "The capital of France is",
                sampling_params={"temperature": 0, "max_new_tokens": 32, "ignore_eos": True},
            )
    except RametError as error:
        return Finding("missing", "self-test", str(error))
    took = time.monotonic() - ready
    if "Paris" not in answer["text"]:
        return Finding("missing", "self-test", f"the model answers {answer['text'][:60]!r}")
    rate = answer["meta_info"]["completion_tokens"] / took
    return Finding("ok", "self-test", f"ready in {ready - began:.1f} s, {rate:.0f} tokens/s")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _writable(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _cpu_flags() -> set[str]:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return set(line.partition(":")[2].split())
    except OSError:
        pass
    return set()
