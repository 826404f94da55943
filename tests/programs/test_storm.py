"""Many programs at once in too little memory, and a third of them vanish on the way."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ramet as rt

NEW = 24
SLOTS = 704

CLIENT = """
import json, sys, threading
import ramet as rt

address, prompts, size = json.loads(sys.stdin.readline())

@rt.function
def endless(s, prompt):
    forks = s.fork(2)
    for number, fork in enumerate(forks):
        fork += prompt + str(number)
        fork += rt.gen("answer", max_tokens=size, ignore_eos=True)

backend = rt.RuntimeEndpoint(address)
states = [endless.run(prompt, backend=backend, temperature=0.0, stream=True) for prompt in prompts]
threading.Thread(
    target=lambda: backend.generate(prompts[0], sampling_params={"max_new_tokens": size}),
    daemon=True,
).start()
for event in states[0].events():
    if event.variable == "answer":
        print("running", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def crowded() -> Iterator[Any]:
    """Room for about a quarter of the storm at a time, and an engine that lets in too many."""
    with rt.Runtime(
        dtype="float32", max_total_tokens=SLOTS, schedule_conservativeness=0.1
    ) as runtime:
        yield runtime


@rt.function
def pair(s: Any, first: str, second: str) -> None:
    """Two branches, each in two generations."""
    branches = s.fork(2)
    for branch, prompt in zip(branches, (first, second)):
        branch += prompt
        branch += rt.gen("head", max_tokens=9, return_logprob=True)
        branch += rt.gen("tail", max_tokens=NEW - 9, return_logprob=True)
    branches.join()


@rt.function
def endless(s: Any, prompt: str) -> None:
    s += prompt
    s += rt.gen("answer", max_tokens=400, ignore_eos=True)


def ids_of(*metas: dict[str, Any]) -> list[int]:
    return [token for meta in metas for _, token, _ in meta["output_token_logprobs"]]


def check_pair(oracle: Any, state: Any, cases: tuple[dict[str, Any], ...]) -> None:
    heads, tails = state.get_meta_info("head"), state.get_meta_info("tail")
    for case, head, tail in zip(cases, heads, tails, strict=True):
        oracle.ids(case, ids_of(head, tail), NEW)
        values = [v for meta in (head, tail) for v, _, _ in meta["output_token_logprobs"]]
        assert values == pytest.approx(case["output_logprobs"][:NEW], abs=1e-3)


def start_client(address: str, prompts: list[str], size: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", CLIENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps([address, prompts, size]) + "\n")
    process.stdin.flush()
    return process


def test_storm(crowded: Any, oracle: Any, greedy_cases: Any, settled: Any) -> None:
    """64 programs: 43 run to their end, 21 are cancelled, time out, or lose their process."""
    long = [case for case in greedy_cases if len(case["output_token_ids"]) >= NEW]
    pairs = [(long[i % len(long)], long[(i * 3 + 1) % len(long)]) for i in range(43)]
    client = start_client(crowded.address, [f"Client {i}: say" for i in range(7)], 400)
    try:
        with ThreadPoolExecutor(64) as pool:
            kept = [
                pool.submit(pair.run, a["prompt"], b["prompt"], backend=crowded, temperature=0.0)
                for a, b in pairs
            ]
            timed = [
                pool.submit(
                    endless.run,
                    f"Timed {i}: say",
                    backend=crowded,
                    timeout=2.0 + i,
                    temperature=0.0,
                )
                for i in range(7)
            ]
            cancelled = [
                endless.run(f"Cancelled {i}: say", backend=crowded, stream=True, temperature=0.0)
                for i in range(7)
            ]
            for number, state in enumerate(cancelled):
                threading.Timer(1.0 + number, state.cancel).start()

            assert client.stdout is not None
            assert client.stdout.readline() == "running\n"
            client.send_signal(signal.SIGKILL)
            client.wait()

            for cases, future in zip(pairs, kept, strict=True):
                check_pair(oracle, future.result(timeout=240), cases)
            for future in timed:
                with pytest.raises(rt.BackendError, match="did not finish within"):
                    future.result(timeout=60)
            for state in cancelled:
                with pytest.raises(rt.AbortedError):
                    _ = state["answer"]
    finally:
        client.kill()
        client.wait()
    info = settled(crowded, 20.0)
    assert info["clients"] == 1, "the killed client is still counted"
    assert info["retracted"] > 0, "the pool was not too small"
    after_the_storm(crowded, oracle, greedy_cases)
    assert settled(crowded)["pages"]["held"] == 0
    crowded.flush_cache()
    pages = crowded.server_info()["pages"]
    assert pages["free"] == pages["total"]


def after_the_storm(runtime: Any, oracle: Any, greedy_cases: Any) -> None:
    """Nothing wrong was left in the cache."""
    case = greedy_cases[0]
    for _ in range(2):
        reply = runtime.generate(
            case["prompt"],
            sampling_params={"temperature": 0.0, "max_new_tokens": 48},
            return_logprob=True,
            logprob_start_len=0,
        )
        oracle.output(case, reply["meta_info"])
        oracle.prompt(case, reply["meta_info"])


def test_a_killed_client_is_dropped_while_others_go_on(
    runtime: Any, oracle: Any, greedy_cases: Any, settled: Any
) -> None:
    client = start_client(runtime.address, ["One thing to say is", "Another is"], 2500)
    try:
        assert client.stdout is not None
        assert client.stdout.readline() == "running\n"
        assert runtime.server_info()["requests"]["running"] >= 1
    finally:
        client.kill()
        client.wait()
    case = greedy_cases[3]
    reply = runtime.generate(
        case["prompt"],
        sampling_params={"temperature": 0.0, "max_new_tokens": 48},
        return_logprob=True,
    )
    oracle.output(case, reply["meta_info"])
    assert settled(runtime, 10.0)["clients"] == 1


def test_an_aborted_request_says_so_and_only_that_one(runtime: Any, settled: Any) -> None:
    endless_params = {"max_new_tokens": 400, "ignore_eos": True, "temperature": 0.0}
    with ThreadPoolExecutor(3) as pool:
        replies = {
            rid: pool.submit(runtime.generate, f"{rid} goes on", sampling_params=params, rid=rid)
            for rid, params in (
                ("a1", endless_params),
                ("a11", {**endless_params, "max_new_tokens": 30}),
                ("a", {**endless_params, "max_new_tokens": 30}),
            )
        }
        deadline = time.monotonic() + 30
        while runtime.server_info()["requests"]["running"] < 3:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        runtime.abort("a1")
        with pytest.raises(rt.AbortedError):
            replies["a1"].result(timeout=30)
        assert replies["a"].result(timeout=60)["meta_info"]["completion_tokens"] == 30
        assert replies["a11"].result(timeout=60)["meta_info"]["completion_tokens"] == 30
    runtime.abort("never heard of")
    settled(runtime)


def test_an_abort_in_the_middle_of_a_prompt(runtime: Any, settled: Any) -> None:
    """Slots taken for a prompt that is never computed to its end are given back."""
    runtime.flush_cache()
    ids = list(range(1000, 8000))
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(
            runtime.generate, input_ids=ids, sampling_params={"max_new_tokens": 1}, rid="long"
        )
        deadline = time.monotonic() + 30
        while not runtime.server_info()["pages"]["held"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        runtime.abort("long")
        with pytest.raises(rt.AbortedError):
            reply.result(timeout=30)
    assert 0 < settled(runtime, 10.0)["pages"]["cached"] < 7000, "it was not in the middle"


def test_an_exception_in_the_function_aborts_what_was_sent(runtime: Any, settled: Any) -> None:
    @rt.function
    def breaks(s: Any) -> None:
        s += "Once upon a time"
        s += rt.gen("story", max_tokens=2000, ignore_eos=True)
        s += rt.gen("more", max_tokens=5)
        deadline = time.monotonic() + 20
        while not runtime.server_info()["requests"]["running"]:
            assert time.monotonic() < deadline, "what was appended was never sent"
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        breaks.run(backend=runtime)
    settled(runtime, 5.0)
    state = breaks.run(backend=runtime, stream=True)
    with pytest.raises(ZeroDivisionError, match="mine"):
        _ = state["more"]
    settled(runtime, 5.0)
