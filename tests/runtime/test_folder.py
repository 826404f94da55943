"""The folder of a runtime's sockets where there is no room for one."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ramet.runtime.folder import SocketFolder
from ramet.runtime.protocol import BackendError


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's name: from a longer one we go elsewhere."""
    path = Path(tempfile.mkdtemp(prefix="t-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def test_no_room_for_the_folder_is_an_error_of_ours(monkeypatch, short):
    monkeypatch.setattr(tempfile, "tempdir", str(short / "absent"))
    with pytest.raises(BackendError, match="sockets"):
        SocketFolder()


@pytest.mark.parametrize("broken", ["fcntl.flock", "pathlib.Path.rename"])
def test_no_room_for_what_is_in_it_leaves_nothing(monkeypatch, short, broken):
    monkeypatch.setattr(tempfile, "tempdir", str(short))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(broken, full)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(BackendError, match="No space left"):
        SocketFolder()
    monkeypatch.undo()
    assert not list(short.iterdir())
    assert len(list(Path("/proc/self/fd").iterdir())) == before
