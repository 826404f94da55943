"""``ramet bench``: what it measures adds up."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ramet.cli_bench_load import Reply

RAMET = [sys.executable, "-P", "-m", "ramet", "bench"]


def bench(tmp_path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    out = tmp_path / "figures.json"
    done = subprocess.run(
        [*RAMET, *arguments, "--out", str(out)], capture_output=True, text=True, timeout=240
    )
    return done, json.loads(out.read_text()) if out.exists() else {}


@pytest.fixture(scope="module")
def url(stub):
    with stub.launched("--rate", "2000", served_model_name="stub") as running:
        yield running.url


@pytest.mark.parametrize(
    "how",
    [[], ["--endpoint", "chat"], ["--no-stream"], ["--request-rate", "100", "--concurrency", "9"]],
)
def test_serve(url, tmp_path, how):
    flags = ["--url", url, "--num-prompts", "30", "--output-len", "20", "--input-len", "40"]
    done, figures = bench(tmp_path, "serve", *flags, *how)
    assert done.returncode == 0, done.stderr
    assert "generated tokens per s" in done.stdout
    assert (figures["requests"], figures["failed"]) == (30, 0)
    assert figures["generated_tokens"] == 600
    assert figures["prompt_tokens"] > 30 * 40
    assert figures["generated_tokens_per_s"] == pytest.approx(600 / figures["seconds"], rel=0.01)
    names = ["e2e_ms"] if "--no-stream" in how else ["ttft_ms", "itl_ms", "e2e_ms"]
    for name in names:
        assert 0 < figures[name]["p50"] <= figures[name]["p90"] <= figures[name]["p99"]
    if "--no-stream" not in how:
        # 20 tokens: one to come first, 19 between.
        whole = figures["ttft_ms"]["mean"] + 19 * figures["itl_ms"]["mean"]
        assert whole == pytest.approx(figures["e2e_ms"]["mean"], rel=0.1, abs=10)


def test_serve_measures_what_the_servers_metrics_say(stub, tmp_path):
    with stub.launched("--rate", "500", served_model_name="stub") as running:
        flags = ["--num-prompts", "24", "--output-len", "20", "--concurrency", "8"]
        _, figures = bench(tmp_path, "serve", "--url", running.url, *flags)
        text = httpx.get(f"{running.url}/metrics").text
    means = {}
    for name in ("time_to_first_token", "inter_token_latency"):
        found = {
            part: float(line.rpartition(" ")[2])
            for line in text.splitlines()
            for part in ("sum", "count")
            if line.startswith(f"ramet:{name}_seconds_{part}")
        }
        means[name] = 1000 * found["sum"] / found["count"]
    # No timed test: others may use the machine. Between tokens hardly anything is added.
    assert figures["itl_ms"]["mean"] == pytest.approx(means["inter_token_latency"], rel=0.2, abs=4)
    assert 0 < means["time_to_first_token"] < figures["ttft_ms"]["mean"]


def test_a_failed_request_is_an_exit_code(url, tmp_path):
    done, figures = bench(tmp_path, "serve", "--url", url, "--num-prompts", "3", "--model", "no")
    assert done.returncode == 1
    assert figures["failed"] == 3
    assert "does not exist" in done.stderr
    done, _ = bench(tmp_path, "serve", "--url", "http://127.0.0.1:9")
    assert done.returncode == 1
    assert done.stderr.startswith("ramet: no server answers at 127.0.0.1:9")


@pytest.mark.model
def test_offline_and_programs(tmp_path):
    small = ["--dtype", "float32", "--context-length", "2048", "--max-total-tokens", "16384"]
    flags = ["--num-prompts", "2", "--input-len", "24", "--shared-len", "8", "--output-len", "4"]
    done, figures = bench(tmp_path, "offline", *flags, "--repeat", "1", *small)
    assert done.returncode == 0, done.stderr
    assert (figures["prompt_tokens"], figures["generated_tokens"]) == (48, 8)


@pytest.mark.model
@pytest.mark.slow
def test_programs_compute_less_with_the_tree(tmp_path):
    small = ["--context-length", "2048", "--max-total-tokens", "16384"]
    done, figures = bench(tmp_path, "programs", "--repeat", "1", *small)
    assert done.returncode == 0, done.stderr
    for name in ("few shots", "select", "fork", "turns"):
        computed = figures[f"{name}, tokens computed"]
        assert computed["tree"] < computed["off"]


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@given(st.lists(st.integers(1, 3), min_size=1, max_size=6), st.data())
def test_events_are_dated_by_the_piece_that_ends_them(counts, data):
    """However TCP cuts what was sent."""
    chunks = []
    number = 0
    for count in counts:
        text = b"".join(b'data: {"n": %d}\n\n' % (number + i) for i in range(count))
        number += count
        chunks.append(b"%x\r\n%b\r\n" % (len(text), text))
    stream = HEAD + b"".join(chunks) + b"0\r\n\r\n"
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=8)))
    edges = [0, *cuts, len(stream)]
    reply = Reply(0.0, [(float(b), stream[a:b]) for a, b in pairwise(edges)])
    events = reply.events()
    assert [event["n"] for _, event in events] == list(range(number))
    place = len(HEAD)
    whens = []
    for count, chunk in zip(counts, chunks):
        end = place + len(chunk) - 2
        whens += [float(next(edge for edge in edges if edge >= end))] * count
        place += len(chunk)
    assert [at for at, _ in events] == whens
    assert reply.status == 200
