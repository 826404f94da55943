"""``ramet serve`` as a process of its own, with the real model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import ramet as rt
from ramet.runtime.protocol import BackendError

pytestmark = pytest.mark.model

RAMET = [sys.executable, "-P", "-m", "ramet"]
SMALL = ["--dtype", "float32", "--max-total-tokens", "2048", "--context-length", "1024"]


class Server:
    """A running ``ramet serve``; ``address`` is what it printed."""

    def __init__(self, *flags: str) -> None:
        self.process = subprocess.Popen(
            [*RAMET, "serve", "smollm2", "--port", "0", "--zmq-port", "0", *SMALL, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.errors: list[str] = []
        threading.Thread(target=self._read_errors, daemon=True).start()
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        found = re.search(r"tcp://\S+", self.line)
        self.address = found[0] if found else ""

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors.append(line.rstrip("\n"))

    def children(self) -> list[int]:
        pid = self.process.pid
        tasks = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(child) for task in tasks for child in task.read_text().split()]

    def command_of(self, pid: int) -> str:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture
def serve():
    servers: list[Server] = []

    def start(*flags: str) -> Server:
        servers.append(Server(*flags))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_serves_programs_of_other_processes_until_ctrl_c(serve, tmp_path):
    server = serve("--served-model-name", "small")
    assert server.line.startswith("small is served at tcp://127.0.0.1:"), server.errors
    assert any(line.endswith("engine ready") for line in server.errors)
    program = tmp_path / "capital.py"
    program.write_text(
        "import ramet as rt\n"
        "@rt.function\n"
        "def capital(s, country):\n"
        "    s += f'The capital of {country} is'\n"
        "    s += rt.gen('city', max_tokens=3, temperature=0, stop='.')\n"
    )
    done = subprocess.run(
        [*RAMET, "run", str(program), "--arg", "country=France", "--backend", server.address],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "The capital of France is Paris\n"
    children = server.children()
    assert len(children) == 2
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(timeout=20) == 0
    assert all(gone(pid) for pid in children)


def test_a_key_is_asked_for_where_one_is_set(serve, monkeypatch):
    server = serve("--api-key", "s3cret")
    with pytest.raises(BackendError):
        rt.RuntimeEndpoint(server.address)
    backend = rt.RuntimeEndpoint(server.address, api_key="s3cret")
    assert backend.server_info()["pages"]["total"] > 0
    for pid in server.children():
        assert "s3cret" not in server.command_of(pid)


def test_ends_with_one_when_the_engine_is_killed_or_the_port_is_taken(serve):
    server = serve()
    port = server.address.rpartition(":")[2]
    second = subprocess.run(
        [*RAMET, "serve", "smollm2", *SMALL, "--port", "0", "--zmq-port", port],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert second.returncode == 1
    assert port in second.stderr.splitlines()[-1]
    assert second.stderr.splitlines()[-1].startswith("ramet: ")
    (engine,) = [p for p in server.children() if "ramet.runtime.engine" in server.command_of(p)]
    os.kill(engine, signal.SIGKILL)
    assert server.process.wait(timeout=10) == 1
    deadline = time.monotonic() + 2
    while not any("SIGKILL" in line for line in server.errors) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "SIGKILL" in server.errors[-1]


def test_doctor_tests_itself():
    done = subprocess.run([*RAMET, "doctor", "--full"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tokens/s" in done.stdout
