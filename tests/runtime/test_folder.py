"""The folder of a runtime's sockets where there is no room for one."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from ramet.runtime.folder import SocketFolder
from ramet.runtime.protocol import BackendError


def test_no_room_for_the_folder_is_an_error_of_ours(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(BackendError, match="sockets"):
        SocketFolder()


@pytest.mark.parametrize("broken", ["fcntl.flock", "pathlib.Path.rename"])
def test_no_room_for_what_is_in_it_leaves_nothing(monkeypatch, tmp_path, broken):
    tempfolder = tmp_path / "t"
    tempfolder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tempfolder))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(broken, full)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(BackendError, match="No space left"):
        SocketFolder()
    monkeypatch.undo()
    assert not list(tempfolder.iterdir())
    assert len(list(Path("/proc/self/fd").iterdir())) == before
