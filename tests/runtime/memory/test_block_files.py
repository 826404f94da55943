"""Files of blocks: whole, ours and private, or refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ramet.runtime.memory.block_files import HEADER_BYTES, BlockFiles, RefusedError
from ramet.runtime.protocol.errors import BadInputError

SIZE = 4096
NAME, OTHER = b"n" * 32, b"o" * 32
PAYLOAD = bytes(range(256)) * (SIZE // 256)


def files(folder: Path, stamp=b"m" * 32, secret=b"k" * 32, size=SIZE) -> BlockFiles:
    return BlockFiles(folder, stamp, secret, size)


def read(store: BlockFiles, name=NAME) -> bytes:
    into = bytearray(store.block_bytes)
    store.read(name, memoryview(into))
    return bytes(into)


@pytest.fixture
def store(tmp_path):
    store = files(tmp_path / "cache")
    store.write(NAME, memoryview(PAYLOAD))
    return store


def test_what_was_written_is_read(store):
    assert read(store) == PAYLOAD
    assert [found.name for found in store.scan()] == [NAME]
    with pytest.raises(FileNotFoundError):
        read(store, OTHER)
    store.remove(NAME)
    store.remove(NAME)
    assert store.scan() == []


def test_nobody_else_may_read_it(store):
    assert store.path(NAME).stat().st_mode & 0o777 == 0o600
    assert store.folder.stat().st_mode & 0o777 == 0o700
    assert store.path(NAME).parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("at", [0, 9, 13, 17, 30, 60, 100, HEADER_BYTES, HEADER_BYTES + SIZE - 1])
def test_a_flipped_bit_anywhere_is_noticed(store, at):
    path = store.path(NAME)
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    with pytest.raises(RefusedError):
        read(store)


@pytest.mark.parametrize("left", [0, 10, HEADER_BYTES, HEADER_BYTES + SIZE - 1])
def test_a_file_cut_short_is_refused(store, left):
    path = store.path(NAME)
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(RefusedError):
        read(store)
    assert store.scan() == []


@pytest.mark.parametrize("kind", ["pipe", "link", "link to a pipe", "folder", "device"])
def test_what_was_put_in_its_place_is_refused_at_once(store, tmp_path, kind):
    path = store.path(NAME)
    moved = tmp_path / "moved"
    path.rename(moved)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(moved)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to(tmp_path / "pipe")
    with pytest.raises((RefusedError, OSError)):
        read(store)
    assert store.scan() == []


def test_of_another_model_size_or_server(store):
    with pytest.raises(RefusedError, match="another model"):
        read(files(store.folder, stamp=b"x" * 32))
    with pytest.raises(RefusedError, match="another server"):
        read(files(store.folder, secret=b"x" * 32))
    with pytest.raises(RefusedError, match="another block"):
        read(files(store.folder, size=SIZE // 2))


def test_a_block_under_the_name_of_another_is_refused(store):
    path = store.path(OTHER)
    path.parent.mkdir(exist_ok=True)
    store.path(NAME).rename(path)
    with pytest.raises(RefusedError, match="its name says"):
        read(store, OTHER)


def test_another_format_is_refused_by_its_number(store):
    path = store.path(NAME)
    data = bytearray(path.read_bytes())
    data[8] += 1
    path.write_bytes(data)
    with pytest.raises(RefusedError, match="format 2, not 1"):
        read(store)


def test_what_is_no_block_is_passed_over_with_a_warning(store, caplog):
    (store.path(NAME).parent / "notes.txt").write_text("mine")
    (store.folder / "README").write_text("mine")
    assert [found.name for found in store.scan()] == [NAME]
    assert "1 files are no blocks" in caplog.text
    assert (store.path(NAME).parent / "notes.txt").exists()


def test_unfinished_files_of_others_are_left_while_they_may_be_written(store):
    folder = store.path(NAME).parent
    mine = folder / f"{OTHER.hex()}.{os.getpid()}-0123abcd.part"
    dead = folder / f"{OTHER.hex()}.99999999-0123abcd.part"
    old = folder / f"{OTHER.hex()}.{os.getpid()}-4567abcd.part"
    for path in (mine, dead, old):
        path.write_bytes(b"")
    os.utime(old, (1000, 1000))
    assert [found.name for found in store.scan()] == [NAME]
    assert mine.exists() and not dead.exists() and not old.exists()


def test_two_servers_of_one_process_number_do_not_share_a_file(store):
    again = files(store.folder)
    assert store._writer != again._writer


def test_an_unfinished_file_that_another_server_removed_is_written_again(store, monkeypatch):
    replace, calls = Path.replace, []

    def removed(self, target):
        calls.append(self)
        if len(calls) == 1:
            self.unlink()
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", removed)
    store.write(OTHER, memoryview(PAYLOAD))
    assert len(calls) == 2 and read(store, OTHER) == PAYLOAD


def test_what_another_server_removes_meanwhile_does_not_hinder_a_start(store, monkeypatch, caplog):
    store.write(OTHER, memoryview(PAYLOAD))
    entries = BlockFiles._entries

    def racing(self):
        for entry in entries(self):
            if entry.name.startswith(OTHER.hex()):
                Path(entry.path).unlink()
            yield entry

    monkeypatch.setattr(BlockFiles, "_entries", racing)
    assert [found.name for found in store.scan()] == [NAME]
    assert not caplog.records


def test_a_folder_that_cannot_be_looked_into_is_named(store, monkeypatch, caplog):
    scandir, closed = os.scandir, [store.folder / name for name in ("yy", "zz")]
    for folder in closed:
        folder.mkdir()

    def refusing(path):
        if Path(path) in closed:
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    assert [found.name for found in store.scan()] == [NAME]
    assert caplog.text.count("Permission denied") == 1
    assert any(f"{folder}, and maybe others" in caplog.text for folder in closed)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInputError, match="cannot be written"):
        files(tmp_path / "file")
    with pytest.raises(BadInputError, match="cannot be written"):
        files(tmp_path / "file" / "below")


WRITER = """
import sys
from pathlib import Path
from ramet.runtime.memory.block_files import BlockFiles
size = 4 << 20
store = BlockFiles(Path(sys.argv[1]), b"m" * 32, b"k" * 32, size)
for i in range(10**6):
    store.write((i % 7).to_bytes(32, "big"), memoryview(bytes([i % 251]) * size))
    if not i:
        print("begun", flush=True)
"""


@pytest.mark.parametrize("after", [0.0, 0.013, 0.031])
def test_killed_while_writing_leaves_nothing_half_done(tmp_path, after):
    writer = subprocess.Popen(
        [sys.executable, "-P", "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE
    )
    assert writer.stdout.readline() == b"begun\n"
    time.sleep(after)
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    store = files(tmp_path, size=4 << 20)
    for found in store.scan():
        content = read(store, found.name)
        assert content == content[:1] * len(content)
    assert not list(tmp_path.rglob("*.part")), "what it left unfinished is gone"
