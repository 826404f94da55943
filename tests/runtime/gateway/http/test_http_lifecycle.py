"""From the first stage of start-up to the last file: what clients see, and what is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ramet as rt
from ramet.runtime import launch
from ramet.runtime.program.events import Value
from ramet.runtime.program.instructions import Gen, Text
from ramet.runtime.protocol.errors import BackendError, ModelError

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "go on", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}


def wait_for(check: Callable[[], Any], seconds: float = 20.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.02)
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def may_bind(port: int) -> bool:
    """A process can be a zombie while threads of it that still end hold its sockets."""
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            again.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def status(url: str) -> int:
    """0 when nobody is there."""
    try:
        return httpx.get(url, timeout=5).status_code
    except httpx.HTTPError:
        return 0


class Stream(threading.Thread):
    """Reads a completion piece by piece, in a thread."""

    def __init__(self, url: str, **body: Any) -> None:
        super().__init__(daemon=True)
        self.url, self.body = url + COMPLETIONS, {**body, "stream": True}
        self.events: list[Any] = []
        self.status = 0
        self.start()

    def run(self) -> None:
        with contextlib.suppress(httpx.RemoteProtocolError):  # it was killed
            self._read()

    def _read(self) -> None:
        with httpx.stream("POST", self.url, json=self.body, timeout=60) as reply:
            self.status = reply.status_code
            for line in reply.iter_lines():
                data = line.removeprefix("data: ")
                if data:
                    self.events.append(data if data == "[DONE]" else json.loads(data))

    def ended(self) -> list[Any]:
        self.join(60)
        assert not self.is_alive()
        assert self.events[-1] == "[DONE]"
        return self.events[:-1]


# --- an engine that dies and comes back -----------------------------------------------------------


def another_engine(site: Any) -> None:
    """A new one, where the one that died was."""
    old = site.world.engine
    old.die()
    engine = site.engine = site.world.engine = type(old)(site.world.engine_address, old.tokenizer)
    engine.next_token = lambda tokens: 97


@pytest.fixture
async def lasting(site: Any) -> Any:
    """A site whose gateway submits again what nobody was told of."""
    site.world.client_of_engine._resubmit = True
    site.engine.idle = True
    return site


@pytest.mark.parametrize("stream", [False, True])
async def test_what_streamed_nothing_is_submitted_again(lasting, stream):
    site, old = lasting, lasting.engine
    body = {"prompt": ["ab", "cd"], "max_tokens": 4, "stream": stream}
    running = asyncio.create_task(site.post(COMPLETIONS, **body))
    await site.world.settle(lambda: len(site.engine.running) == 2)
    another_engine(site)
    reply = await running
    assert reply.status_code == 200
    assert reply.text.count("a") >= 8
    again = site.engine.submits
    assert [s.ids for s in again] == [s.ids for s in old.submits]
    assert not {s.rid for s in again} & {s.rid for s in old.submits}, "answers could be mixed up"
    await site.idle()


async def test_whole_answers_begin_anew_and_are_whole(lasting):
    """Half of it had come, but nobody had been told."""
    site = lasting
    site.engine.next_token = lambda tokens: 98
    running = asyncio.create_task(site.post(COMPLETIONS, prompt="xy", max_tokens=30, logprobs=1))
    site.engine.idle = False
    await site.world.settle(
        lambda: any(len(r.tokens) > 5 for r in site.world.client_of_engine._requests.values())
    )
    another_engine(site)
    reply = (await running).json()
    assert reply["choices"][0]["text"] == "a" * 30
    assert reply["usage"]["completion_tokens"] == 30
    assert len(reply["choices"][0]["logprobs"]["tokens"]) == 30
    text = (await site.http.get("/metrics")).text
    assert re.search(r"^ramet:engine_restarts_total\S* 1.0$", text, re.MULTILINE)
    assert re.search(r"^ramet:generation_tokens_total\S* 30.0$", text, re.MULTILINE)


async def test_what_has_streamed_fails_and_says_so(lasting):
    site = lasting
    site.engine.idle = False
    site.engine.next_token = lambda tokens: 98
    body = {"prompt": "xy", "max_tokens": 400, "stream": True}
    async with site.http.stream("POST", COMPLETIONS, json=body) as reply:
        lines = reply.aiter_lines()
        assert "b" in await anext(lines)
        another_engine(site)
        rest = [line async for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert "gone" in json.loads(rest[-2].removeprefix("data: "))["error"]["message"]
    await site.idle()
    assert site.engine.submits == []


async def test_a_request_is_not_submitted_a_third_time(lasting):
    """It may be what the engine dies of."""
    site = lasting
    running = asyncio.create_task(site.post(COMPLETIONS, prompt="xy", max_tokens=4))
    await site.world.settle(lambda: bool(site.engine.running))
    another_engine(site)
    site.engine.idle = True
    await site.world.settle(lambda: bool(site.engine.running))
    another_engine(site)
    reply = await running
    assert reply.status_code == 503
    assert reply.headers["retry-after"]
    await site.world.settle(lambda: site.state.health() is None)
    assert site.engine.submits == []


async def test_a_client_that_goes_away_meanwhile_is_not_submitted_for(lasting):
    site = lasting
    running = asyncio.create_task(site.post(COMPLETIONS, prompt="xy", max_tokens=4))
    await site.world.settle(lambda: bool(site.engine.running))
    site.engine.die()
    await site.world.settle(lambda: site.state.health() is not None)
    reply = await site.post(COMPLETIONS, prompt="new", max_tokens=4)
    assert reply.status_code == 503, "new ones do not wait for an engine that may not come"
    running.cancel()
    await site.world.settle(lambda: not site.state.runs)
    another_engine(site)
    await site.world.settle(lambda: site.state.health() is None)
    assert site.engine.submits == []


async def test_a_program_goes_on_with_another_engine(lasting):
    """Which has nothing of what the program's stream was built on."""
    site = lasting
    site.engine.idle = False
    site.engine.next_token = lambda tokens: 97
    client = site.world.client()
    await client.greet()
    long = {"max_new_tokens": 400}
    client.open(
        [
            Text(parts=("xy",)),
            Gen(op=0, name="x", sampling={"max_new_tokens": 3}),
            Text(parts=("z",)),
            Gen(op=1, name="y", sampling=long),
        ]
    )
    await site.world.settle(lambda: len(site.engine.submits) == 2)
    another_engine(site)
    values = {e.name: e.value for e in await client.events() if isinstance(e, Value)}
    assert values == {"x": "aaa", "y": "a" * 400}
    (again,) = site.engine.submits
    assert again.base is None
    assert len(again.ids) == 4 * len("xyaaaz")


def test_an_embedded_runtime_s_engine_comes_back(tiny_model):
    params = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    with rt.Runtime(
        tiny_model, load_format="dummy", dtype="float32", random_seed=1, max_total_tokens=4096,
        restart_engine=True,
    ) as runtime:  # fmt: skip
        before = runtime.generate("a", sampling_params=params)["text"]
        pid = runtime.launched.pids["engine"]
        os.kill(pid, signal.SIGKILL)

        def again() -> str | None:
            with contextlib.suppress(BackendError):  # while it is not there
                return runtime.generate("a", sampling_params=params)["text"]
            return None

        assert wait_for(again) == before
        assert runtime.launched.pids["engine"] != pid


def under_way(url: str) -> int:
    """Requests that the engine has."""
    requests = httpx.get(url + "/server_info").json()["requests"]
    return requests["running"] + requests["waiting"]


def test_a_killed_engine_is_started_again_under_its_requests(launched):
    """The real one: nothing that waited is lost, and it is healthy again."""
    running = launched(restart_engine=True)
    expected = httpx.post(running.url + COMPLETIONS, json=LONG, timeout=60).json()["choices"]
    replies: list[httpx.Response] = []

    def ask() -> None:
        replies.append(httpx.post(running.url + COMPLETIONS, json=LONG, timeout=60))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    stream = Stream(running.url, **LONG)
    for thread in threads:
        thread.start()
    wait_for(lambda: len(stream.events) > 5)
    # One that comes when the engine is gone already is told so: all must be there before.
    wait_for(lambda: under_way(running.url) == len(threads) + 1)
    os.kill(running.pids["engine"], signal.SIGKILL)
    assert "gone" in stream.ended()[-1]["error"]["message"]
    for thread in threads:
        thread.join(60)
    assert [reply.status_code for reply in replies] == [200] * 4
    assert all(reply.json()["choices"] == expected for reply in replies)
    assert status(running.url + "/health") == 200
    assert running.check() is None
    held = httpx.get(running.url + "/server_info").json()["pages"]["held"]
    assert held == 0


def test_a_killed_engine_fails_all_at_once(launched):
    running = launched()
    streams = [Stream(running.url, **LONG) for _ in range(4)]
    wait_for(lambda: all(len(stream.events) > 5 for stream in streams))
    os.kill(running.pids["engine"], signal.SIGKILL)
    began = time.monotonic()
    for stream in streams:
        assert "gone" in stream.ended()[-1]["error"]["message"]
    assert time.monotonic() - began < 5
    assert status(running.url + "/health") == status(running.url + "/ready") == 503
    reply = httpx.post(running.url + COMPLETIONS, json=LONG)
    assert reply.status_code == 503
    assert reply.headers["retry-after"]
    assert "SIGKILL" in running.check().message


@pytest.mark.slow
def test_a_frozen_engine_is_unhealthy_until_it_goes_on(launched):
    """Its process is there and its socket is open, but nobody is at home."""
    running = launched()
    stream = Stream(running.url, **LONG)
    wait_for(lambda: len(stream.events) > 5)
    pid = running.pids["engine"]
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: status(running.url + "/health") == 503, 25)
        assert "gone" in stream.ended()[-1]["error"]["message"]
        assert status(running.url + "/metrics") == 200, "a scrape waits for nobody"
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: status(running.url + "/health") == 200)
    reply = httpx.post(running.url + COMPLETIONS, json={**LONG, "max_tokens": 5}, timeout=30)
    assert reply.json()["usage"]["completion_tokens"] == 5
    wait_for(lambda: httpx.get(running.url + "/server_info").json()["requests"]["running"] == 0, 40)


# --- the command ----------------------------------------------------------------------------------


class Served:
    """``ramet serve`` as a process, with a folder of its own for what is temporary."""

    def __init__(self, tiny_model: str, *flags: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ramet", "serve", tiny_model, "--load-format", "dummy",
             "--dtype", "float32", "--max-total-tokens", "8192", "--random-seed", "1", *flags],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "TMPDIR": str(self.folder)},
        )  # fmt: skip
        self.errors: list[str] = []
        threading.Thread(target=self._read_errors, daemon=True).start()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(line.rstrip("\n") for line in self.process.stderr)

    def ready(self) -> str:
        """Its URL, once it serves."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, self.errors
        return found[0]

    def descendants(self) -> list[int]:
        """All processes that it, and those that it started, have started."""
        found = [self.process.pid]
        for pid in found:
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                found += map(int, task.read_text().split())
        return found[1:]

    def left(self) -> list[Path]:
        return list(self.folder.iterdir())


@pytest.fixture
def serve(tiny_model: str) -> Iterator[Callable[..., Served]]:
    servers: list[Served] = []

    def start(*flags: str) -> Served:
        servers.append(Served(tiny_model, *flags))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
        server.process.communicate()
        wait_for(lambda server=server: not server.left())
        server.folder.rmdir()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("*")}


def test_a_killed_server_leaves_no_process_no_socket_no_file(serve):
    before = shared_memory()
    server = serve("--port", str(free_port()), "--zmq-port", "0")
    url = server.ready()
    body = {"prompt": "a", "max_tokens": 8, "structured_outputs": {"regex": "[ab]{4}"}}
    assert httpx.post(url + COMPLETIONS, json=body, timeout=60).status_code == 200
    pids = server.descendants()
    assert len(pids) >= 3, "gateway, engine, and what compiled the expression"
    stream = Stream(url, **LONG)
    wait_for(lambda: len(stream.events) > 2)
    server.process.kill()
    wait_for(lambda: not any(alive(pid) for pid in pids), 5)
    wait_for(lambda: not server.left(), 5)
    wait_for(lambda: may_bind(int(url.rpartition(":")[2])), 5)
    assert shared_memory() <= before


def test_a_server_stopped_while_it_loads_leaves_nothing(serve):
    server = serve("--port", "0", "--zmq-port", "0")
    pids = wait_for(lambda: len(found := server.descendants()) >= 2 and found)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(10) != 0
    wait_for(lambda: not any(alive(pid) for pid in pids), 5)
    wait_for(lambda: not server.left(), 5)


def test_sigterm_lets_what_runs_finish(serve):
    server = serve("--port", "0", "--zmq-port", "0")
    url = server.ready()
    assert server.errors, "start-up said nothing"
    stages = [line for line in server.errors if re.fullmatch(r" *\d+\.\d\d s  \S.*", line)]
    for stage in ("model files", "tokenizer", "weights", "engine ready", "gateway ready"):
        assert any(stage in line for line in stages), stage
    stream = Stream(url, **LONG)
    wait_for(lambda: len(stream.events) > 2)
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: status(url + "/ready") == 503)
    refused = httpx.post(url + COMPLETIONS, json=LONG)
    assert refused.status_code == 503
    assert "shutting down" in refused.json()["error"]["message"]
    events = stream.ended()
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(20) == 0
    assert not server.left()


def test_what_does_not_finish_in_time_is_told_so(serve):
    server = serve("--port", "0", "--zmq-port", "0", "--drain-seconds", "0.3")
    url = server.ready()
    streams = [Stream(url, **LONG) for _ in range(16)]
    wait_for(lambda: all(len(stream.events) > 2 for stream in streams))
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(15) == 0
    for stream in streams:
        assert "abort" in stream.ended()[-1]["error"]["message"]


def test_a_port_in_use_is_one_clear_line(serve):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = serve("--port", str(port))
        assert server.process.wait(30) == 1
        wait_for(lambda: server.errors)
        assert f"127.0.0.1:{port}" in server.errors[-1]
        assert "in use" in server.errors[-1]
        assert "--port" in server.errors[-1]
        assert len(server.errors) == 1


def test_two_servers_on_one_machine_just_work(launched):
    """Neither says where programs connect: one of them has the usual port, or somebody else has."""
    first, second = (launched(zmq_port=None) for _ in range(2))
    ports = [address.rpartition(":")[2] for one in (first, second) for address in one.addresses[1:]]
    assert len(set(ports)) == 2
    for one in (first, second):
        assert httpx.get(one.url + "/health").status_code == 200
    with pytest.raises(BackendError, match="in use"):
        launched(zmq_port=int(ports[1]))
    first.stop()
    assert httpx.get(second.url + "/health").status_code == 200


def test_the_port_answers_while_the_model_is_fetched(tiny_settings, monkeypatch):
    fetched = threading.Event()
    monkeypatch.setattr(launch, "_resolve", lambda config, progress: fetched.wait(60))
    url = f"http://127.0.0.1:{(port := free_port())}"
    box: list[launch.Launched] = []
    settings = {**tiny_settings, "port": port}
    thread = threading.Thread(target=lambda: box.append(launch.start(settings, listen=True)))
    thread.start()
    try:
        wait_for(lambda: status(url + "/health") == 503)
        time.sleep(0.5)
        assert status(url + "/ready") == 503
        assert not box
    finally:
        fetched.set()
        thread.join(60)
    try:
        assert status(url + "/ready") == 200
    finally:
        box[0].stop()


def test_a_model_that_is_not_there_stops_what_was_begun(tiny_settings, monkeypatch):
    pids: list[int] = []
    begun = launch.Launched._check_started

    def check(self: launch.Launched) -> None:
        begun(self)
        pids.extend(self.pids.values())

    monkeypatch.setattr(launch.Launched, "_check_started", check)
    began = time.monotonic()
    monkeypatch.setattr(launch, "STOP_SECONDS", 60.0)  # it is not killed: it ends by itself
    with pytest.raises(ModelError, match="no-such-model"):
        launch.start({**tiny_settings, "model_path": "no-such-model"}, listen=True)
    assert len(pids) == 1, "the gateway alone"
    assert time.monotonic() - began < 30
    wait_for(lambda: not alive(pids[0]), 5)


# --- start-up -------------------------------------------------------------------------------------

SLOW_ENGINE = """
import os, sys, time
from ramet.runtime.engine.__main__ import main

while not os.path.exists(os.environ["MAY_LOAD"]):
    time.sleep(0.02)
sys.exit(main())
"""


def test_the_port_answers_while_the_model_loads(tiny_settings, tmp_path, monkeypatch):
    (tmp_path / "slow_engine.py").write_text(textwrap.dedent(SLOW_ENGINE))
    may_load = tmp_path / "go"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("MAY_LOAD", str(may_load))
    monkeypatch.setattr(launch, "MODULES", {**launch.MODULES, "engine": "slow_engine"})
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    box: list[launch.Launched] = []
    told: list[tuple[str, float]] = []
    settings = {**tiny_settings, "port": port, "metrics_key": "m"}
    thread = threading.Thread(
        target=lambda: box.append(
            launch.start(settings, listen=True, on_progress=lambda *stage: told.append(stage))
        )
    )
    thread.start()
    try:
        wait_for(lambda: status(url + "/health"))
        for path in ("/health", "/ready", "/v1/models"):
            reply = httpx.get(url + path)
            assert reply.status_code == 503
            assert "loading" in reply.json()["error"]["message"]
            assert reply.headers["retry-after"]
        assert httpx.get(url + "/version").status_code == 200
        assert not box
    finally:
        may_load.touch()
        thread.join(60)
        running = box[0]
    try:
        assert status(url + "/health") == status(url + "/ready") == 200
        seconds = [seconds for _, seconds in told]
        assert seconds == sorted(seconds)
        assert len(told) >= 5
    finally:
        running.stop()
