"""Starting, watching and stopping children; stand-ins play the gateway and the engine."""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

import pytest
from ramet.runtime import launch
from ramet.runtime.protocol import BackendError, BadInputError, ModelError

STAND_IN = """
import argparse, os, signal, sys, time
from ramet.runtime import child
from ramet.runtime.protocol import ModelError

child.follow_parent()
parser = argparse.ArgumentParser()
for flag in ("--config", "--engine", "--drain", "--wait-for"):
    parser.add_argument(flag)
parser.add_argument("--bind", action="append")
parser.add_argument("--http", action="store_true")
args = parser.parse_args()
how = os.environ.get("GATEWAY_DOES" if args.engine else "ENGINE_DOES", "serve")
print("a line for the log", file=sys.stderr)
if how == "crash":
    raise RuntimeError("no such weights")
if how == "tell":
    child.tell_error(ModelError("model x is not there"))
    sys.exit(1)
child.tell_stage("weights")
if how == "hang":
    time.sleep(60)
if how == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child.tell_ready(
    model="m",
    config=args.config,
    bind=args.bind,
    key=os.environ.get("RAMET_API_KEY"),
    spins=os.environ.get("GOMP_SPINCOUNT"),
)
while True:
    time.sleep(1)
"""


@pytest.fixture(autouse=True)
def stand_ins(tmp_path, monkeypatch):
    """Both children are a script of ours; sockets go to a folder of this test."""
    (tmp_path / "stand_in.py").write_text(textwrap.dedent(STAND_IN))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(launch, "MODULES", {"gateway": "stand_in", "engine": "stand_in"})
    monkeypatch.setattr(launch, "_resolve", lambda config, progress: None)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert not list(folder.glob("ramet-*")), "a socket folder was left behind"
    folder.rmdir()


def alive(pid: int) -> bool:
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def gone_within(pids, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def test_starts_both_tells_progress_and_stops(stand_ins):
    told: list[tuple[str, float]] = []
    logged: list[tuple[str, str]] = []
    running = launch.start(
        {"dtype": "float32"},
        on_progress=lambda what, seconds: told.append((what, seconds)),
        on_log=lambda name, line: logged.append((name, line)),
    )
    pids = running.pids
    assert set(pids) == {"gateway", "engine"}
    assert running.check() is None
    assert running.address.startswith("ipc://")
    folder = pathlib.Path(running.address.removeprefix("ipc://")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert '"dtype":"float32"' in running.facts["engine"]["config"]
    assert running.facts["gateway"]["bind"] == [running.address]
    whats = [what for what, _ in told]
    assert {"engine: weights", "engine ready", "gateway ready"} <= set(whats)
    assert [seconds for _, seconds in told] == sorted(seconds for _, seconds in told)
    running.stop()
    running.stop()
    assert gone_within(pids.values(), 1)
    assert running.check() is not None
    assert ("engine", "a line for the log") in logged
    assert ("gateway", "a line for the log") in logged


def test_two_at_once_share_nothing():
    first, second = launch.start({}), launch.start({})
    try:
        assert first.address != second.address
        assert not set(first.pids.values()) & set(second.pids.values())
        first.stop()
        assert second.check() is None
    finally:
        first.stop()
        second.stop()


def test_a_child_that_crashes_while_starting_says_its_last_words(monkeypatch):
    monkeypatch.setenv("ENGINE_DOES", "crash")
    with pytest.raises(BackendError, match=r"engine exited with code 1.*no such weights") as caught:
        launch.start({})
    assert any("Traceback" in note for note in caught.value.__notes__)


def test_a_child_that_tells_its_error_has_it_raised(monkeypatch):
    monkeypatch.setenv("ENGINE_DOES", "tell")
    with pytest.raises(ModelError, match="model x is not there"):
        launch.start({})


def test_a_child_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setenv("ENGINE_DOES", "hang")
    with pytest.raises(BackendError, match="not ready after 2 s: engine"):
        launch.start({}, timeout=2)


def test_a_killed_engine_is_seen():
    running = launch.start({})
    try:
        os.kill(running.pids["engine"], signal.SIGKILL)
        assert gone_within([running.pids["engine"]], 2)
        error = running.check()
        assert error is not None
        assert error.kind == "backend"
        assert "SIGKILL" in error.message
    finally:
        running.stop()


def test_a_child_that_ignores_sigterm_is_killed(monkeypatch):
    monkeypatch.setenv("GATEWAY_DOES", "stubborn")
    monkeypatch.setattr(launch, "STOP_SECONDS", 0.3)
    running = launch.start({})
    pids = running.pids.values()
    running.stop()
    assert gone_within(pids, 1)


def test_children_outlive_the_thread_that_started_them():
    box: list[launch.Launched] = []
    thread = threading.Thread(target=lambda: box.append(launch.start({})))
    thread.start()
    thread.join()
    try:
        time.sleep(0.3)
        assert box[0].check() is None
    finally:
        box[0].stop()


def test_children_die_with_a_parent_that_is_killed_and_leave_nothing(stand_ins):
    script = textwrap.dedent("""
        import tempfile, sys, time
        tempfile.tempdir = sys.argv[1]
        from ramet.runtime import launch
        launch.MODULES = {"gateway": "stand_in", "engine": "stand_in"}
        launch._resolve = lambda config, progress: None
        print(*launch.start({}).pids.values(), flush=True)
        time.sleep(60)
    """)
    parent = subprocess.Popen(
        [sys.executable, "-P", "-c", script, str(stand_ins)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.kill()
    parent.communicate()
    assert gone_within(pids, 3)
    deadline = time.monotonic() + 3
    while list(stand_ins.glob("ramet-*")):
        assert time.monotonic() < deadline, "its folder is still there"
        time.sleep(0.02)


def test_a_start_sweeps_what_nobody_could_remove(stand_ins):
    """Of a runtime that was killed together with all that would have tidied up after it."""
    left = stand_ins / "ramet-left"
    left.mkdir()
    (left / "lock").touch()
    (left / "gateway.ipc").touch()
    running = launch.start({})
    try:
        assert not left.exists()
        second = launch.start({})
        second.stop()
        assert running.check() is None
        assert pathlib.Path(running.address.removeprefix("ipc://")).parent.exists()
    finally:
        running.stop()


def test_what_tidies_up_ends_with_the_runtime(stand_ins):
    running = launch.start({})
    folder = str(pathlib.Path(running.address.removeprefix("ipc://")).parent)

    def janitors() -> list[str]:
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if folder.encode() in path.read_bytes() and b"janitor" in path.read_bytes():
                    found.append(path.parent.name)
            except OSError:
                pass
        return found

    assert len(janitors()) == 1
    running.stop()
    deadline = time.monotonic() + 3
    while janitors():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for(check, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.02)


def test_a_dead_engine_is_started_again_when_told_to():
    logged: list[tuple[str, str]] = []
    running = launch.start(
        {"restart_engine": True}, on_log=lambda name, line: logged.append((name, line))
    )
    try:
        before = running.pids
        os.kill(before["engine"], signal.SIGKILL)
        wait_for(lambda: running.pids["engine"] != before["engine"])
        assert running.pids["gateway"] == before["gateway"]
        wait_for(lambda: ("launcher", "engine ready") in logged)
        assert running.check() is None
        assert any("SIGKILL" in line for name, line in logged if name == "launcher")
        pids = running.pids
    finally:
        running.stop()
    assert gone_within(pids.values(), 1)


def test_an_engine_that_dies_too_often_stays_dead(monkeypatch):
    monkeypatch.setattr(launch, "MOST_RESTARTS", 2)
    running = launch.start({"restart_engine": True})
    try:
        for _ in range(2):
            pid = running.pids["engine"]
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda pid=pid: running.pids["engine"] != pid)
            assert running.check() is None
        os.kill(running.pids["engine"], signal.SIGKILL)
        wait_for(lambda: running.check() is not None)
        assert "SIGKILL" in running.check().message
        time.sleep(0.3)
        assert running.check() is not None
    finally:
        running.stop()


def test_a_dead_gateway_is_not_started_again():
    running = launch.start({"restart_engine": True})
    try:
        os.kill(running.pids["gateway"], signal.SIGKILL)
        wait_for(lambda: running.check() is not None)
        assert "gateway" in running.check().message
    finally:
        running.stop()


def test_a_stop_while_the_engine_starts_again_leaves_nothing(monkeypatch):
    running = launch.start({"restart_engine": True})
    monkeypatch.setenv("ENGINE_DOES", "hang")
    os.kill(running.pids["engine"], signal.SIGKILL)
    first = running.pids["engine"]
    wait_for(lambda: running.pids["engine"] != first)
    pids = running.pids
    running.stop(0.5)
    assert gone_within(pids.values(), 1)


def test_a_port_in_use_is_said_before_anything_starts(stand_ins):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BackendError, match=rf"127.0.0.1:{port}.*in use.*--port"):
            launch.start({"port": port}, listen=True)
    assert not list(stand_ins.iterdir())


def test_leaving_the_interpreter_stops_the_children(stand_ins):
    script = textwrap.dedent("""
        import tempfile, sys
        tempfile.tempdir = sys.argv[1]
        from ramet.runtime import launch
        launch.MODULES = {"gateway": "stand_in", "engine": "stand_in"}
        launch._resolve = lambda config, progress: None
        print(*launch.start({}).pids.values())
    """)
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, str(stand_ins)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert gone_within([int(pid) for pid in done.stdout.split()], 1)


def test_listening_binds_tcp_and_passes_the_key_by_the_environment():
    running = launch.start({"api_key": "s3cret", "port": 0, "zmq_port": 7499}, listen=True)
    try:
        gateway, engine = running.facts["gateway"], running.facts["engine"]
        assert gateway["bind"] == [running.address, "tcp://127.0.0.1:7499"]
        assert gateway["key"] == "s3cret"
        assert not engine["key"]
        for pid in running.pids.values():
            assert b"s3cret" not in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    finally:
        running.stop()


def test_a_key_in_the_environment_is_not_for_a_runtime_that_was_given_none(monkeypatch):
    monkeypatch.setenv("RAMET_API_KEY", "for another server")
    running = launch.start({})
    try:
        assert running.facts["gateway"]["key"] == ""
    finally:
        running.stop()


@pytest.mark.parametrize(("chosen", "used"), [(None, "2000"), ("7", "7")])
def test_the_threads_of_an_engine_spin_briefly_unless_told_otherwise(monkeypatch, chosen, used):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    if chosen:
        monkeypatch.setenv("GOMP_SPINCOUNT", chosen)
    running = launch.start({})
    try:
        assert running.facts["engine"]["spins"] == used
    finally:
        running.stop()


def test_an_open_interface_needs_a_key():
    with pytest.raises(BadInputError, match="api_key"):
        launch.start({"host": "0.0.0.0"}, listen=True)


def test_bad_settings_start_nothing(stand_ins):
    with pytest.raises(TypeError, match="no_such"):
        launch.start({"no_such": 1})
    assert not list(stand_ins.iterdir())


def test_launching_needs_no_torch():
    script = "import sys, ramet.runtime.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", script]).returncode == 0
