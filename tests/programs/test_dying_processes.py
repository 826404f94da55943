"""Processes that are killed: whoever waits learns of it, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ramet as rt

ENDLESS = {"max_new_tokens": 1000, "ignore_eos": True, "temperature": 0.0}
ONE = {"temperature": 0.0, "max_new_tokens": 1}


@rt.function
def reads_inside(s: Any) -> None:
    s += "Once"
    s += rt.gen("story", max_tokens=1000, ignore_eos=True)
    s += s["story"]


@rt.function
def forks(s: Any) -> None:
    branches = s.fork(2)
    for index, branch in enumerate(branches):
        branch += f"Once {index}"
        branch += rt.gen("story", max_tokens=1000, ignore_eos=True)
    branches.join()
    s += rt.gen("end", max_tokens=1)


def in_a_function(backend: Any) -> None:
    reads_inside.run(backend=backend)


def in_a_stream(backend: Any) -> None:
    state = reads_inside.run(backend=backend, stream=True)
    for _ in state.text_iter("story"):
        pass


def of_all_events(backend: Any) -> None:
    for _ in forks.run(backend=backend, stream=True).events():
        pass


def after_a_join(backend: Any) -> None:
    _ = forks.run(backend=backend)["end"]


def of_a_generation(backend: Any) -> None:
    backend.generate("Once", sampling_params=ENDLESS)


def of_a_streamed_generation(backend: Any) -> None:
    for _ in backend.generate("Once", sampling_params=ENDLESS, stream=True):
        pass


def in_asyncio(backend: Any) -> None:
    async def main() -> None:
        state = await reads_inside.arun(backend=backend, stream=True)
        async for _ in state.text_async_iter("story"):
            pass

    asyncio.run(main())


def of_an_asyncio_generation(backend: Any) -> None:
    asyncio.run(backend.async_generate("Once", sampling_params=ENDLESS))


READERS = [
    in_a_function,
    in_a_stream,
    of_all_events,
    after_a_join,
    of_a_generation,
    of_a_streamed_generation,
    in_asyncio,
    of_an_asyncio_generation,
]


class Waiting:
    """A reader in a thread, and when and how its wait ended."""

    def __init__(self, read: Callable[[Any], None], backend: Any) -> None:
        self.name = f"{read.__name__} ({type(backend).__name__})"
        self.error: BaseException | None = None
        self.ended = 0.0
        self._read, self._backend = read, backend
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._read(self._backend)
        except BaseException as error:
            self.error = error
        self.ended = time.monotonic()

    def check(self, killed: float, seconds: float) -> None:
        self._thread.join(max(0.0, killed + seconds - time.monotonic()))
        assert not self._thread.is_alive(), f"{self.name} still waits after {seconds} s"
        assert isinstance(self.error, rt.BackendError), f"{self.name}: {self.error!r}"


@pytest.fixture
def own(runtime: Any) -> Iterator[Any]:
    """A runtime to be killed. The shared one, in the same process, must not notice."""
    del runtime
    with rt.Runtime(dtype="float32", max_total_tokens=16384) as runtime:
        yield runtime


@pytest.mark.parametrize("victim", ["engine", "gateway"])
def test_every_waiting_reader_raises(own: Any, victim: str) -> None:
    endpoint = rt.RuntimeEndpoint(own.address)
    waiting = [Waiting(read, backend) for read in READERS for backend in (own, endpoint)]
    deadline = time.monotonic() + 60
    while (at_work := own.server_info()["requests"])["running"] < len(waiting):
        assert time.monotonic() < deadline, at_work
        time.sleep(0.1)
    assert all(reader.error is None for reader in waiting)
    killed = time.monotonic()
    os.kill(own.launched.pids[victim], signal.SIGKILL)
    for reader in waiting:
        reader.check(killed, 5.0)
    began = time.monotonic()
    with pytest.raises(rt.BackendError, match=victim):
        own.generate("a", sampling_params=ONE)
    with pytest.raises(rt.BackendError):
        reads_inside.run(backend=own)
    with pytest.raises(rt.BackendError):
        own.server_info()
    assert time.monotonic() - began < 5
    folder = Path(own.address.removeprefix("ipc://")).parent
    assert folder.exists()
    own.shutdown()
    assert not folder.exists()
    assert not any(alive(pid) for pid in own.launched.pids.values())
    endpoint.shutdown()


def test_shutdown_fails_what_runs(own: Any) -> None:
    waiting = [Waiting(read, own) for read in (in_a_function, of_a_generation)]
    deadline = time.monotonic() + 30
    while own.server_info()["requests"]["running"] < 2:
        assert time.monotonic() < deadline
    began = time.monotonic()
    own.shutdown()
    own.shutdown()
    for reader in waiting:
        reader.check(began, 10.0)
    assert time.monotonic() - began < 10
    with pytest.raises(rt.BackendError, match="shut down"):
        own.generate("a", sampling_params=ONE)


def test_two_runtimes_at_once(runtime: Any, oracle: Any, greedy_cases: Any) -> None:
    greedy = {"temperature": 0.0, "max_new_tokens": 48}
    case = greedy_cases[0]
    with rt.Runtime(dtype="float32", max_total_tokens=1024) as other:
        assert not set(other.launched.pids.values()) & set(runtime.launched.pids.values())
        assert other.address != runtime.address
        replies: dict[Any, Any] = {}

        def ask(backend: Any) -> None:
            replies[backend] = backend.generate(
                case["prompt"], sampling_params=greedy, return_logprob=True
            )

        threads = [threading.Thread(target=ask, args=(b,)) for b in (runtime, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for backend in (runtime, other):
            oracle.output(case, replies[backend]["meta_info"])
    ask(runtime)
    oracle.output(case, replies[runtime]["meta_info"])


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def gone(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


SCRIPT = """
    import sys
    import ramet as rt

    runtime = rt.Runtime(dtype="float32", max_total_tokens=512)
    print(*runtime.launched.pids.values(), flush=True)
    ask = {"max_new_tokens": 400, "ignore_eos": True, "temperature": 0.0}
    if sys.argv[1] == "stays":
        for reply in runtime.generate("Once", sampling_params=ask, stream=True):
            print("running", flush=True)
    elif sys.argv[1] == "breaks":
        raise ZeroDivisionError("mine")
"""
"""No guard of ``__main__``, no shutdown: as people write their first script."""


def start_script(tmp_path: Path, how: str) -> tuple[subprocess.Popen[str], list[int]]:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    process = subprocess.Popen(
        [sys.executable, "-P", str(script), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2, process.communicate()
    return process, pids


def test_a_script_that_breaks_leaves_nothing(tmp_path: Path) -> None:
    process, pids = start_script(tmp_path, "breaks")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "ZeroDivisionError: mine" in errors
    assert gone(pids, 1)
    assert list(tmp_path.iterdir()) == [tmp_path / "script.py"]


def test_ctrl_c_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    process, pids = start_script(tmp_path, "stays")
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in errors
    assert gone(pids, 1)
    assert list(tmp_path.iterdir()) == [tmp_path / "script.py"]


def test_children_die_with_a_killed_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process, pids = start_script(tmp_path, "stays")
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    assert all(alive(pid) for pid in pids)
    process.kill()
    process.wait()
    assert gone(pids, 5), "a child outlived its parent"
    # Nobody was left to remove the folder of the sockets: the next start does.
    script, pids = start_script(tmp_path, "returns")
    script.communicate(timeout=60)
    assert script.returncode == 0
    assert gone(pids, 1)
    assert list(tmp_path.iterdir()) == [tmp_path / "script.py"]
