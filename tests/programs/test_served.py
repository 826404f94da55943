"""`ramet serve` in a process of its own, and programs that reach it over TCP."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ramet as rt

KEY = "a-key-of-ours"
GREEDY = {"temperature": 0.0, "max_new_tokens": 48}


class Server:
    def __init__(self, *flags: str) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "ramet", "serve", "smollm2-135m-instruct"),
                *("--dtype", "float32", "--max-total-tokens", "4096"),
                *("--zmq-port", "0", "--port", "0"),
                *flags,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "RAMET_API_KEY": KEY},
        )
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        found = re.search(r"tcp://127\.0\.0\.1:\d+", said)
        assert found is not None, said
        self.address = found[0]

    def stop(self, number: int, seconds: float) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=seconds)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    assert server.stop(signal.SIGTERM, 60) == 0


@pytest.fixture
def endpoint(server: Server) -> Iterator[Any]:
    with rt.RuntimeEndpoint(server.address, api_key=KEY) as endpoint:
        yield endpoint


@rt.function
def completion(s: Any, prompt: str) -> None:
    s += prompt
    s += rt.gen("answer", return_logprob=True, logprob_start_len=0)


def test_programs_over_tcp(endpoint: Any, oracle: Any, sixteen: Any, settled: Any) -> None:
    states: Any = completion.run_batch(
        [{"prompt": case["prompt"]} for case in sixteen],
        backend=endpoint,
        temperature=0.0,
        max_new_tokens=48,
    )
    for case, state in zip(sixteen, states, strict=True):
        meta = state.get_meta_info("answer")
        oracle.output(case, meta)
        oracle.prompt(case, meta)
    assert settled(endpoint)["model"] == endpoint.model == "smollm2-135m-instruct"
    rt.flush_cache(endpoint)


def test_the_default_backend(endpoint: Any, greedy_cases: Any) -> None:
    case = greedy_cases[1]
    rt.set_default_backend(endpoint)
    try:
        assert rt.get_server_info()["context_length"] == 8192
        state = completion.run(case["prompt"], temperature=0.0, max_new_tokens=48)
        assert state["answer"] == case["output_text"]
    finally:
        rt.set_default_backend(None)


@pytest.mark.parametrize("key", [None, "", "another", KEY + " "])
def test_the_wrong_key(server: Server, key: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAMET_API_KEY", raising=False)
    with pytest.raises(rt.BackendError, match="key"):
        rt.RuntimeEndpoint(server.address, api_key=key)


def test_nobody_is_there() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    began = time.monotonic()
    with pytest.raises(rt.BackendError, match="127"):
        rt.RuntimeEndpoint(address, timeout=1.0)
    assert time.monotonic() - began < 5
    with pytest.raises(rt.BadInputError, match="ftp"):
        rt.RuntimeEndpoint("ftp://127.0.0.1:5")


def test_clients_share_the_cache(endpoint: Any, server: Server, greedy_cases: Any) -> None:
    ids = greedy_cases[0]["prompt_token_ids"]
    endpoint.flush_cache()
    first = endpoint.generate(input_ids=ids, sampling_params=GREEDY)
    with rt.RuntimeEndpoint(server.address, api_key=KEY) as other:
        second = other.generate(input_ids=ids, sampling_params=GREEDY)
    assert first["meta_info"]["cached_tokens"] == 0
    assert second["meta_info"]["cached_tokens"] == len(ids) - 1
    assert first["output_ids"] == second["output_ids"] == greedy_cases[0]["output_token_ids"]


def test_curve_encrypts(tmp_path: Path, greedy_cases: Any) -> None:
    """A client without the server's key gets nowhere; one with it is served."""
    keys = tmp_path / "keys"
    server = Server("--curve", str(keys))
    try:
        (public,) = [path for path in keys.iterdir() if "public" in path.name]
        server_key = public.read_text("utf-8").strip()
        with pytest.raises(rt.BackendError):
            rt.RuntimeEndpoint(server.address, api_key=KEY, timeout=2.0)
        with rt.RuntimeEndpoint(server.address, api_key=KEY, server_key=server_key) as endpoint:
            reply = endpoint.generate(greedy_cases[1]["prompt"], sampling_params=GREEDY)
            assert reply["text"] == greedy_cases[1]["output_text"]
    finally:
        server.stop(signal.SIGTERM, 60)


@pytest.mark.slow
def test_a_killed_server_fails_its_clients() -> None:
    server = Server()
    endpoint: Any = rt.RuntimeEndpoint(server.address, api_key=KEY)
    stream = endpoint.generate(
        "Once", sampling_params={"max_new_tokens": 2000, "ignore_eos": True}, stream=True
    )
    next(stream)
    ended: list[float] = []

    def read() -> None:
        with pytest.raises(rt.BackendError):
            for _ in stream:
                pass
        ended.append(time.monotonic())

    reader = threading.Thread(target=read)
    reader.start()
    killed = time.monotonic()
    server.stop(signal.SIGKILL, 10)
    reader.join(10)
    assert ended
    assert ended[0] - killed < 5
    endpoint.shutdown()


def test_a_server_that_is_told_to_stop_finishes_what_runs() -> None:
    """Ctrl-C, or SIGTERM: several seconds of work are still done."""
    server = Server()
    endpoint: Any = rt.RuntimeEndpoint(server.address, api_key=KEY)
    params = {"temperature": 0.0, "max_new_tokens": 130, "ignore_eos": True}
    stream = endpoint.generate("Once upon a time", sampling_params=params, stream=True)
    next(stream)
    server.process.send_signal(signal.SIGTERM)
    last = list(stream)[-1]
    assert last["meta_info"]["completion_tokens"] == 130
    assert server.process.wait(timeout=60) == 0
    endpoint.shutdown()
