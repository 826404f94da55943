"""The secret of a cache folder: made once, private, the same for whoever asks."""

from __future__ import annotations

import os
import threading

import pytest
from ramet.runtime.protocol.errors import BadInputError
from ramet.runtime.server_secret import SECRET_NAME, server_secret


def test_without_a_folder_it_is_new_each_time():
    assert server_secret(None, "a") != server_secret(None, "a")


def test_with_one_it_is_the_same_and_each_use_has_its_own(tmp_path):
    folder = str(tmp_path / "new" / "cache")
    one = server_secret(folder, "names")
    assert len(one) == 32 and one == server_secret(folder, "names")
    assert one != server_secret(folder, "seals")
    path = tmp_path / "new" / "cache" / SECRET_NAME
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.read_bytes() != one
    assert [p.name for p in path.parent.iterdir()] == [SECRET_NAME]


def test_two_that_begin_together_agree(tmp_path):
    found, gate = [], threading.Barrier(8)

    def ask() -> None:
        gate.wait()
        found.append(server_secret(str(tmp_path), "names"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1


def test_what_cannot_be_used_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInputError, match=r"disk_cache_dir: .*file cannot be used"):
        server_secret(str(tmp_path / "file"), "names")
    for folder in ("a\0b", "~no-such-user/cache"):
        with pytest.raises(BadInputError, match=r"disk_cache_dir: .* cannot be used"):
            server_secret(folder, "names")
    (tmp_path / SECRET_NAME).write_bytes(b"short")
    with pytest.raises(BadInputError, match="should hold 32 bytes, not 5"):
        server_secret(str(tmp_path), "names")


def test_what_stands_in_for_a_secret_is_refused(tmp_path):
    path = tmp_path / SECRET_NAME
    for make in (path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero")):
        make()
        with pytest.raises(BadInputError, match=r"secret is no file|Is a directory"):
            server_secret(str(tmp_path), "names")
        path.rmdir() if path.is_dir() else path.unlink()
    path.write_bytes(bytes(1 << 20))
    with pytest.raises(BadInputError, match="should hold 32 bytes, not more"):
        server_secret(str(tmp_path), "names")


def test_another_users_secret_is_refused(tmp_path, monkeypatch):
    server_secret(str(tmp_path), "names")
    path = tmp_path / SECRET_NAME
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
        owner = 12345
    else:
        owner = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(BadInputError, match=f"secret is of user {owner}"):
        server_secret(str(tmp_path), "names")
